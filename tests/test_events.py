import asyncio
import dataclasses
import json
import logging
import re
import threading

import pytest

from agentcache.errors import ConfigError
from agentcache.event_log import JsonlEventLog, read_events
from agentcache.events import (
    EventBus,
    KVPaused,
    KVResumed,
    PolicyFellBack,
    PromptRevised,
    QualityChecked,
    ReplyEnded,
)
from agentcache.types import AlignedRun, RevisionKind

REVISED = PromptRevised(
    episode="e/../é",
    version="v2",
    parent="v1",
    kind=RevisionKind.TOOL_RESULT,
    prefix=3,
    aligned=(AlignedRun(0, 0, 3), AlignedRun(9, 8, 40)),
    old_len=50,
    new_len=60,
    labels=("system", "tool:call_1"),
    diff_ms=1.5,
)
ENDED = ReplyEnded(
    episode="e/../é",
    version="v2",
    finish_reason="stop",
    reply_tokens=2,
    recovery={"rows": "P*3 X*5 F*40 N*12"},
    spans=((0, 3), (3, 60)),
    fresh_text=("é", "", " x"),
)
PAUSED = KVPaused(episode="e", key="call_1", version="v1", reason="tool")
RESUMED = KVResumed(
    episode="e", key="call_1", version="v2", recovery={"reused_tokens": 12, "exact": False, "reason": None}
)
CHECKED = QualityChecked(episode="e", version="v2", policy="p", kl=0.25, top1_agrees=True, agreement=1.0, strike=False)
FELL_BACK = PolicyFellBack(scope="policy", episode="e", policy="p", reason="a KL of 3")


@pytest.fixture
def bus():
    return EventBus()


def test_events_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        REVISED.prefix = 4


def test_a_subscriber_gets_the_kinds_that_it_asked_for(bus):
    every, some = [], []
    bus.subscribe(every.append)
    bus.subscribe(some.append, kinds=["kv_paused"])
    for event in (REVISED, PAUSED, RESUMED):
        assert bus.emit(event)
    assert every == [REVISED, PAUSED, RESUMED]
    assert some == [PAUSED]


def test_an_unknown_kind_is_refused(bus):
    kinds = ["kv_paused", "kv_resumed", "policy_fell_back", "prompt_revised", "quality_checked", "reply_ended"]
    with pytest.raises(ConfigError, match=re.escape(f"['nothing']; there are {kinds}")):
        bus.subscribe(print, kinds=["nothing"])


def test_unsubscribing_ends_delivery_and_may_be_repeated(bus):
    seen = []
    unsubscribe = bus.subscribe(seen.append)
    unsubscribe()
    unsubscribe()
    bus.emit(REVISED)
    assert seen == []


def test_a_failing_subscriber_is_logged_and_counted_and_stops_nobody(bus, caplog):
    seen = []
    bus.subscribe(lambda event: event.episode / 0)
    bus.subscribe(seen.append)
    with caplog.at_level(logging.ERROR):
        assert bus.emit(REVISED)
    assert seen == [REVISED]
    assert bus.failures == 1
    assert "prompt_revised" in caplog.text
    assert "TypeError" in caplog.text


def test_a_second_pause_for_the_same_key_is_not_delivered(bus):
    seen = []
    bus.subscribe(seen.append)
    assert bus.emit(PAUSED)
    assert not bus.emit(dataclasses.replace(PAUSED, time_s=1.0))
    assert bus.emit(dataclasses.replace(PAUSED, key="call_2"))
    assert bus.emit(dataclasses.replace(PAUSED, episode="other"))
    assert len(seen) == 3
    assert bus.is_paused("e", "call_1")


def test_a_resumed_key_can_be_paused_again(bus):
    bus.emit(PAUSED)
    assert bus.emit(RESUMED)
    assert not bus.is_paused("e", "call_1")
    assert bus.emit(PAUSED)


def test_a_resume_without_a_key_ends_all_pauses_of_its_episode(bus):
    for event in (PAUSED, dataclasses.replace(PAUSED, key="2"), dataclasses.replace(PAUSED, episode="other")):
        bus.emit(event)
    bus.emit(KVResumed(episode="e"))
    assert [bus.is_paused("e", key) for key in ("call_1", "2")] == [False, False]
    assert bus.is_paused("other", "call_1")


def test_forgetting_an_episode_ends_its_pauses_without_an_event(bus):
    seen = []
    bus.emit(PAUSED)
    bus.subscribe(seen.append)
    bus.forget("e")
    assert not bus.is_paused("e", "call_1")
    assert seen == []


def test_pauses_from_many_threads_are_delivered_once(bus):
    seen = []
    bus.subscribe(seen.append)
    gate = threading.Barrier(8)

    def pause():
        gate.wait()
        bus.emit(PAUSED)

    threads = [threading.Thread(target=pause) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [PAUSED]


async def test_emit_schedules_coroutine_functions_on_the_running_loop(bus):
    seen = asyncio.Queue()
    bus.subscribe(seen.put)
    assert bus.emit(REVISED)
    assert await asyncio.wait_for(seen.get(), 5) == REVISED


async def test_aemit_waits_for_coroutine_functions_and_calls_functions(bus):
    seen = []

    async def slow(event):
        await asyncio.sleep(0)
        seen.append(("slow", event))

    bus.subscribe(slow)
    bus.subscribe(lambda event: seen.append(("plain", event)))
    assert await bus.aemit(PAUSED)
    assert sorted(seen, key=lambda s: s[0]) == [("plain", PAUSED), ("slow", PAUSED)]
    assert not await bus.aemit(PAUSED)


async def test_a_failing_coroutine_is_logged_and_counted(bus, caplog):
    async def fail(event):
        raise ValueError("broken")

    bus.subscribe(fail)
    await bus.aemit(REVISED)
    bus.emit(REVISED)
    for _ in range(5):
        await asyncio.sleep(0)
    assert bus.failures == 2
    assert "broken" in caplog.text


async def test_an_event_from_another_thread_runs_on_the_subscribers_loop(bus):
    seen = asyncio.Queue()
    loops = []

    async def subscriber(event):
        loops.append(asyncio.get_running_loop())
        await seen.put(event)

    bus.subscribe(subscriber)
    await asyncio.to_thread(bus.emit, REVISED)
    assert await asyncio.wait_for(seen.get(), 5) == REVISED
    assert loops == [asyncio.get_running_loop()]


def test_without_any_loop_a_coroutine_function_runs_at_once(bus):
    seen = []

    async def subscriber(event):
        seen.append(event)

    bus.subscribe(subscriber)
    bus.emit(REVISED)
    assert seen == [REVISED]


def test_a_log_gives_back_every_event(tmp_path):
    path = tmp_path / "new" / "events.jsonl"
    with JsonlEventLog(path) as log:
        for event in (REVISED, ENDED, PAUSED, RESUMED, CHECKED, FELL_BACK):
            log(event)
    assert list(read_events(path)) == [REVISED, ENDED, PAUSED, RESUMED, CHECKED, FELL_BACK]


def test_lines_are_flushed_one_by_one_and_say_what_they_are(tmp_path):
    path = tmp_path / "events.jsonl"
    with JsonlEventLog(path) as log:
        log(REVISED)
        lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1
    values = json.loads(lines[0])
    assert (values["schema"], values["event"], values["episode"]) == (1, "prompt_revised", "e/../é")
    assert (values["kind"], values["aligned"], values["time_s"]) == (
        "tool_result",
        [[0, 0, 3], [9, 8, 40]],
        REVISED.time_s,
    )
    assert "é" in lines[0]


def test_a_log_is_appended_to(tmp_path):
    path = tmp_path / "events.jsonl"
    for event in (REVISED, PAUSED):
        with JsonlEventLog(path) as log:
            log(event)
    assert list(read_events(path)) == [REVISED, PAUSED]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_last_line_that_a_crash_cut_short_is_removed(tmp_path, cut, caplog):
    path = tmp_path / "events.jsonl"
    with JsonlEventLog(path) as log:
        log(REVISED)
        log(PAUSED)
    path.write_bytes(path.read_bytes()[:-cut])
    with JsonlEventLog(path) as log:
        log(RESUMED)
    assert list(read_events(path)) == [REVISED, RESUMED]
    assert "cut short" in caplog.text


def test_a_last_line_that_is_cut_short_anywhere_is_not_read(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    with JsonlEventLog(path) as log:
        log(PAUSED)
        log(REVISED)  # its episode has a character of two bytes
    first, last = path.read_bytes().splitlines(keepends=True)
    for cut in range(1, len(last) - 1):
        path.write_bytes(first + last[:cut])
        assert list(read_events(path)) == [PAUSED]
        assert f"cut short, {cut} bytes" in caplog.text


def test_a_log_of_nothing_but_a_cut_line_has_no_events(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"sch')
    assert list(read_events(path)) == []


def test_a_last_line_that_is_whole_is_read_though_its_end_is_missing(tmp_path):
    path = tmp_path / "events.jsonl"
    with JsonlEventLog(path) as log:
        log(PAUSED)
        log(RESUMED)
    path.write_bytes(path.read_bytes()[:-1])
    assert list(read_events(path)) == [PAUSED, RESUMED]


@pytest.mark.parametrize(
    "last", [b"notes of mine", b'{"event":"kv_paused"', b'{"schema":2,"event":"x"}', b'{"schema":1,"event":"\xff"}\n']
)
def test_a_last_line_that_is_no_cut_event_is_named(tmp_path, last):
    path = tmp_path / "events.jsonl"
    with JsonlEventLog(path) as log:
        log(PAUSED)
    path.write_bytes(path.read_bytes() + last)
    with pytest.raises(ConfigError, match="line 2 is not an event"):
        list(read_events(path))


def test_a_log_of_nothing_but_a_cut_line_starts_again(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"schema":1,"eve')
    with JsonlEventLog(path) as log:
        log(PAUSED)
    assert list(read_events(path)) == [PAUSED]


@pytest.mark.parametrize("content", [b"notes of mine", b"[]\n", b"x"])
def test_a_file_that_is_no_event_log_is_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not an event log"):
        JsonlEventLog(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"event":"kv_paused","episode":"e","key":"k"}',
        '{"schema":2,"event":"kv_paused","episode":"e","key":"k"}',
        '{"schema":1,"event":"unheard_of","episode":"e"}',
        '{"schema":1,"event":"kv_paused","episode":"e"}',
        '{"schema":1,"event":"kv_paused","episode":"e","key":"k","more":1}',
        '{"schema":1,"event":"kv_paused","episode":5,"key":"k"}',
    ],
)
def test_a_line_that_is_no_event_is_named(tmp_path, line):
    path = tmp_path / "events.jsonl"
    with JsonlEventLog(path) as log:
        log(PAUSED)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2 is not an event"):
        list(read_events(path))


def test_a_log_on_a_bus_is_written_by_many_threads_line_by_line(tmp_path, bus):
    path = tmp_path / "events.jsonl"
    with JsonlEventLog(path) as log:
        bus.subscribe(log)
        threads = [
            threading.Thread(target=lambda n=n: [bus.emit(KVPaused(episode=f"e{n}", key=str(k))) for k in range(50)])
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(read_events(path))) == 300
    assert bus.failures == 0


def test_a_closed_log_fails_as_a_subscriber_and_breaks_nothing(tmp_path, bus):
    log = JsonlEventLog(tmp_path / "events.jsonl")
    bus.subscribe(log)
    log.close()
    assert bus.emit(REVISED)
    assert bus.failures == 1
