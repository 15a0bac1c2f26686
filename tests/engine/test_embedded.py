"""The asynchronous façade on a real engine: requests, episodes, cancellation, death and restart."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from agentcache import (
    AgentCacheError,
    AsyncAgentCache,
    ConfigError,
    EngineDeadError,
    KVPaused,
    KVResumed,
    PromptRevised,
    RequestTimeout,
    RevisionKind,
    UnknownVersionError,
)
from agentcache.events import ReplyEnded

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = {"dtype": "float32", "kv_bytes": 64 << 20, "max_model_len": 2048, "policy": "edit_local"}
FACTS = [f"Fact {i}: item {i} weighs {7 * i} grams and stands on shelf {i % 5}." for i in range(24)]
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "extra": {"ignore_eos": True}}
LONG = list(range(100, 400))


def chat(result: str, *more: str) -> list[dict[str, Any]]:
    """A conversation whose tool result is `result`; `more` are later user turns."""
    return [
        {"role": "system", "content": "Answer from the documents."},
        {"role": "user", "content": "How heavy is item 7?", "id": "q"},
        {"role": "tool", "content": result, "tool_call_id": "c1"},
        {"role": "user", "content": " ".join(FACTS), "id": "facts"},
        *({"role": "user", "content": text} for text in more),
    ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cache(tiny: Callable[[str], Path]) -> AsyncIterator[AsyncAgentCache]:
    async with AsyncAgentCache(tiny("llama"), **SETTINGS) as cache:
        yield cache


def unfinished(cache: AsyncAgentCache) -> int:
    engine = cache._session.engine
    assert engine is not None
    return int(engine.llm.get_num_unfinished_requests())


async def idle(cache: AsyncAgentCache) -> None:
    """Waits until neither the caller nor the engine holds a request: resetting the prefix cache needs every block free."""
    async with asyncio.timeout(60):
        while unfinished(cache) or not await cache.reset_prefix_cache():
            await asyncio.sleep(0.05)


# -- requests outside of an episode ------------------------------------------------------------------------------------


async def test_a_stream_gives_the_tokens_of_generate_one_by_one(cache: AsyncAgentCache) -> None:
    whole = await cache.generate(LONG, max_tokens=12, extra={"ignore_eos": True})
    chunks = [c async for c in cache.stream(LONG, max_tokens=12, extra={"ignore_eos": True})]
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids and len(whole.token_ids) == 12
    assert len(chunks) > 1  # tokens that come while this loop is busy share a chunk
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.reply is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].reply is not None and chunks[-1].reply.text == whole.text
    assert whole.finish_reason == "length" and whole.prompt_tokens == len(LONG)


async def test_a_plain_request_has_no_version_and_no_report(cache: AsyncAgentCache) -> None:
    reply = await cache.generate("hello", max_tokens=2)
    assert (reply.version, reply.parent, reply.recovery) == (None, None, None)
    assert reply.ttft_ms > 0


async def test_a_string_is_one_user_message(cache: AsyncAgentCache) -> None:
    as_text = await cache.render("hello")
    as_message = await cache.render([{"role": "user", "content": "hello"}])
    assert as_text.token_ids.tolist() == as_message.token_ids.tolist()
    assert [s.role for s in as_text.spans] == ["user"]


async def test_log_probabilities_of_the_whole_vocabulary(cache: AsyncAgentCache) -> None:
    reply = await cache.generate(LONG, max_tokens=2, logprobs=-1, extra={"ignore_eos": True})
    assert reply.logprobs is not None and [len(p) for p in reply.logprobs] == [49_152] * 2
    for token, position in zip(reply.token_ids, reply.logprobs, strict=True):
        assert max(position, key=position.__getitem__) == token
    top = await cache.generate(LONG, max_tokens=2, logprobs=3, extra={"ignore_eos": True})
    assert top.logprobs is not None and [len(p) for p in top.logprobs] == [3, 3]


async def test_a_salt_keeps_a_plain_requests_blocks_to_itself(cache: AsyncAgentCache) -> None:
    await cache.reset_prefix_cache()
    await cache.generate(LONG, max_tokens=1, salt="one")
    assert (await cache.generate(LONG, max_tokens=1, salt="two")).cached_tokens == 0
    assert (await cache.generate(LONG, max_tokens=1, salt="one")).cached_tokens > 0


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        (LONG, {"n": 2}, "one continuation"),
        (LONG, {"extra": {"prompt_logprobs": 1}}, "nothing can be recovered"),
        (LONG, {"policy": "edit_local"}, "needs an episode"),
        (LONG, {"extra": {"nonsense": 1}}, "nonsense"),
        (LONG, {"extra": {"min_p": 7.0}}, "min_p"),
        (LONG, {"extra": {"extra_args": {"kv_transfer_params": {}}}}, "kv_transfer_params"),
        (list(range(2100)), {}, "2048"),
        ([10**9], {}, "out of vocabulary"),
        ([[1, 2], [3, 4]], {}, "flat sequence"),
    ],
)
async def test_a_bad_request_is_refused_with_its_reason(
    cache: AsyncAgentCache, messages: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await cache.generate(messages, **options)
    assert unfinished(cache) == 0


async def test_another_event_loop_is_refused(cache: AsyncAgentCache) -> None:
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(cache.generate(LONG, max_tokens=1))
        except AgentCacheError as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert "another event loop" in str(failures[0])


async def test_stats_say_what_the_engine_is(cache: AsyncAgentCache) -> None:
    stats = await cache.stats()
    assert stats["engine"]["dtype"] == "float32" and stats["engine"]["layers"] == 4
    # The KV space is exactly what was asked for, to a block.
    row_bytes = stats["engine"]["row_bytes"]
    assert 0 <= (64 << 20) - stats["kv_tokens"] * row_bytes < 32 * row_bytes
    assert stats["ranks"][0]["attached"]


# -- episodes ----------------------------------------------------------------------------------------------------------


async def test_an_edited_prompt_is_recovered_from_the_head(cache: AsyncAgentCache) -> None:
    episode = cache.episode("edit")
    first = await episode.generate(chat("It weighs 12 grams."), max_tokens=4)
    second = await episode.generate(chat("It weighs 49 grams, as was measured again."), max_tokens=4)
    assert first.recovery is not None and first.parent is None and first.recovery.reason is None
    assert first.recovery.saved == "pending"
    assert second.parent == first.version and second.version == episode.head
    report = second.recovery
    assert report is not None and report.policy == "edit_local" and report.reason is None
    assert report.reused_tokens > 300 and report.fresh_tokens > 0 and report.repair_tokens == 32
    assert (
        report.prefix_tokens + report.fresh_tokens + report.repair_tokens + report.reused_tokens + report.new_tokens
        == (second.prompt_tokens)
    )
    assert second.cached_tokens == second.prompt_tokens - report.new_tokens
    assert report.restore_ms > 0 and report.recompute_ms > 0 and report.ttft_ms == second.ttft_ms > 0
    assert not report.exact


async def test_history_tells_each_versions_kind_parent_and_tokens(cache: AsyncAgentCache) -> None:
    episode = cache.episode("history")
    assert episode.history() == [] and episode.head is None
    prompts = [chat("12 grams"), chat("12 grams", "And item 8?"), chat("49 grams", "And item 8?")]
    for number, prompt in enumerate(prompts):
        await episode.generate(prompt, max_tokens=3, attributes={"checkpoint": number}, extra={"ignore_eos": True})
    records = episode.history()
    assert [r.kind for r in records] == [RevisionKind.FIRST, RevisionKind.APPEND, RevisionKind.TOOL_RESULT]
    assert [r.parent for r in records] == [None, records[0].version, records[1].version]
    assert [r.attributes["checkpoint"] for r in records] == [0, 1, 2]
    assert [r.reply_tokens for r in records] == [3, 3, 3]
    last = records[-1].recovery
    assert last is not None and last.version == records[-1].version and last.reused_tokens > 0


async def test_the_exact_policys_tokens_are_those_of_a_plain_request(cache: AsyncAgentCache) -> None:
    episode = cache.episode("exact")
    await episode.generate(chat("12 grams"), max_tokens=2, policy="prefix_cache")
    edited = chat("It is 49 grams by now", "So?")
    reply = await episode.generate(edited, max_tokens=16, policy="prefix_cache")
    assert reply.recovery is not None and reply.recovery.exact and reply.recovery.reused_tokens == 0
    await idle(cache)
    plain = await cache.generate((await cache.render(edited)).token_ids.tolist(), max_tokens=16)
    assert plain.cached_tokens == 0 and plain.token_ids == reply.token_ids


async def test_a_fork_goes_on_from_the_version_it_began_at(cache: AsyncAgentCache) -> None:
    episode = cache.episode("trunk")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    second = await episode.generate(chat("49 grams"), max_tokens=2)
    assert first.version is not None
    fork = episode.fork(first.version, name="branch")
    reply = await fork.generate(chat("13 grams"), max_tokens=2)
    assert reply.parent == first.version and episode.head == second.version
    assert [r.version for r in fork.history()] == [first.version, reply.version]
    assert reply.recovery is not None and reply.recovery.reused_tokens > 0
    with pytest.raises(ConfigError, match="already"):
        episode.fork(name="branch")
    with pytest.raises(UnknownVersionError, match="no version 'nope'"):
        episode.fork("nope")
    with pytest.raises(UnknownVersionError, match="no version to fork from"):
        cache.episode("unborn").fork()


async def test_an_unknown_parent_is_served_exactly_and_said(cache: AsyncAgentCache) -> None:
    episode = cache.episode("foreign")
    reply = await episode.generate(chat("12 grams"), max_tokens=2, parent="another-process")
    assert reply.recovery is not None and reply.recovery.exact
    assert "'another-process' is unknown" in str(reply.recovery)


async def test_an_unsaved_version_is_not_the_default_parent(cache: AsyncAgentCache) -> None:
    episode = cache.episode("unsaved")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    trial = await episode.generate(chat("13 grams"), max_tokens=2, save=False)
    assert trial.recovery is not None and trial.recovery.saved == "no"
    after = await episode.generate(chat("14 grams"), max_tokens=2)
    assert trial.parent == after.parent == first.version
    assert after.recovery is not None and after.recovery.reason is None and after.recovery.reused_tokens > 0


async def test_a_policy_and_its_options_are_those_of_the_request(cache: AsyncAgentCache) -> None:
    episode = cache.episode("policies")
    first = await episode.generate(chat("12 grams"), max_tokens=1)
    reports = [
        (
            await episode.generate(chat("49 grams"), max_tokens=1, parent=first.version, save=False, salt=str(i), **o)
        ).recovery
        for i, o in enumerate(({"policy_options": {"k": 8}}, {"policy": "direct_reuse"}))
    ]
    assert [r.repair_tokens for r in reports if r is not None] == [8, 0]
    with pytest.raises(ConfigError, match="unknown policy"):
        await episode.generate(chat("x"), policy="nope")
    with pytest.raises(ConfigError, match="no option 'depth'"):
        await episode.generate(chat("x"), policy_options={"depth": 2})


async def test_a_request_that_ends_in_the_step_of_its_load_has_the_loads_times(cache: AsyncAgentCache) -> None:
    episode = cache.episode("one token")
    await episode.generate(chat("12 grams"), max_tokens=1)
    report = (await episode.generate(chat("49 grams, measured twice"), max_tokens=1)).recovery
    assert report is not None and report.restored_tokens > 300 and report.restore_ms > 0 and report.saved == "pending"


async def test_a_reply_that_a_stop_string_ends_is_reported_and_kept(cache: AsyncAgentCache) -> None:
    episode = cache.episode("stop")
    whole = await episode.generate(chat("12 grams"), max_tokens=24)
    text = whole.text[len(whole.text) // 2 :].strip()[:6]
    reply = await episode.generate(chat("12 grams"), max_tokens=24, stop=text)
    assert reply.finish_reason == "stop" and text not in reply.text and len(reply.token_ids) < len(whole.token_ids)
    assert reply.recovery is not None and reply.recovery.version == reply.version
    assert reply.recovery.saved == "pending" and reply.recovery.parent == whole.version
    child = await episode.generate(chat("49 grams"), max_tokens=1)
    assert child.parent == reply.version and child.recovery is not None and child.recovery.reused_tokens > 0


async def test_subscribers_hear_of_revision_resume_and_pause_in_order(cache: AsyncAgentCache) -> None:
    heard: list[Any] = []

    async def listen(event: Any) -> None:
        heard.append(event)

    unsubscribe = cache.subscribe(listen)
    episode = cache.episode("events")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    episode.pause("tool-1", reason="a search")
    episode.resume_hint("tool-1")
    second = await episode.generate(chat("49 grams"), max_tokens=2)
    await asyncio.sleep(0)
    unsubscribe()
    await episode.generate(chat("50 grams"), max_tokens=1)
    kinds = [PromptRevised, ReplyEnded, KVPaused, KVPaused, KVResumed, PromptRevised, ReplyEnded, KVResumed, KVPaused]
    assert [type(e) for e in heard] == kinds
    assert heard[3].key == "tool-1" and heard[3].version == first.version
    assert heard[5].kind == RevisionKind.TOOL_RESULT and heard[5].parent == first.version
    assert heard[6].version == heard[7].version == heard[8].version == second.version
    assert heard[7].recovery == heard[6].recovery and heard[7].recovery["reused_tokens"] > 0
    assert heard[6].reply_tokens == 2 and heard[6].fresh_text is None


async def test_a_dropped_episode_is_forgotten(cache: AsyncAgentCache) -> None:
    episode = cache.episode("dropped")
    reply = await episode.generate(chat("12 grams"), max_tokens=1)
    await episode.drop()
    assert episode.history() == [] and reply.version not in cache._session.reports


async def held(cache: AsyncAgentCache) -> tuple[int, int]:
    """Returns how many versions the index holds, and how many objects the worker does."""
    assert await cache.flush()
    rank = (await cache.stats())["ranks"][0]
    return rank["index"]["versions"], rank["objects"]


async def test_a_dropped_episode_frees_its_kv(cache: AsyncAgentCache) -> None:
    before = await held(cache)
    episode = cache.episode("freed")
    await episode.generate(chat("13 grams"), max_tokens=2)
    await episode.generate(chat("14 grams"), max_tokens=2)
    assert (await held(cache))[0] == before[0] + 2
    await episode.drop()
    assert await held(cache) == before


async def test_a_fork_keeps_what_it_needs_of_a_dropped_episode(cache: AsyncAgentCache) -> None:
    episode = cache.episode("trunk")
    first = await episode.generate(chat("15 grams"), max_tokens=2)
    await episode.generate(chat("16 grams"), max_tokens=2)
    fork = episode.fork(first.version)
    before = await held(cache)
    await episode.drop()
    assert (await held(cache))[0] == before[0] - 1
    reply = await fork.generate(chat("17 grams"), max_tokens=2)
    assert reply.parent == first.version and reply.recovery is not None and reply.recovery.reused_tokens > 0
    await fork.drop()


async def test_a_reply_to_an_episode_that_was_dropped_meanwhile_is_not_kept(cache: AsyncAgentCache) -> None:
    before = await held(cache)
    episode = cache.episode("late")
    chunks = episode.stream(chat("18 grams"), max_tokens=8)
    await anext(chunks)
    await episode.drop()
    async for _ in chunks:
        pass
    deadline = asyncio.get_running_loop().time() + 30
    while await held(cache) != before:
        assert asyncio.get_running_loop().time() < deadline, await held(cache)


async def test_an_episode_that_is_dropped_while_its_next_prompt_is_rendered_stays_gone(cache: AsyncAgentCache) -> None:
    before = await held(cache)
    episode = cache.episode("rendering")
    await episode.generate(chat("19 grams"), max_tokens=2)
    late = asyncio.create_task(episode.generate(chat("20 grams"), max_tokens=2))
    await asyncio.sleep(0)  # up to the thread that renders
    await episode.drop()
    reply = await late
    assert len(reply.token_ids) == 2 and reply.version is None and reply.recovery is None
    assert episode.history() == [] and await held(cache) == before
    again = await episode.generate(chat("21 grams"), max_tokens=2)
    assert [record.version for record in episode.history()] == [again.version]
    await episode.drop()


@pytest.mark.parametrize("episode_id", ["", "x" * 257])
async def test_an_episodes_id_has_a_length(cache: AsyncAgentCache, episode_id: str) -> None:
    with pytest.raises(ConfigError, match="1 to 256 characters"):
        cache.episode(episode_id)


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_eight_episodes_at_once_reply_as_one_after_the_other(cache: AsyncAgentCache) -> None:
    def prompts(i: int) -> list[list[dict[str, Any]]]:
        return [chat(f"{i} grams"), chat(f"{i}{i} grams, corrected", f"Question {i}?")]

    async def run(name: str, i: int) -> list[list[int]]:
        episode = cache.episode(f"{name} {i}")
        return [(await episode.generate(p, max_tokens=8, policy="prefix_cache")).token_ids for p in prompts(i)]

    await idle(cache)
    together = await asyncio.gather(*(run("together", i) for i in range(8)))
    await idle(cache)
    assert together == [await run("alone", i) for i in range(8)]


async def test_two_requests_of_one_episode_at_once_both_end(cache: AsyncAgentCache) -> None:
    episode = cache.episode("two at once")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    replies = await asyncio.gather(*(episode.generate(chat(f"{n} grams"), max_tokens=4) for n in (13, 14)))
    assert [r.parent for r in replies] == [first.version] * 2
    assert {r.version for r in replies} < {r.version for r in episode.history()}
    assert all(r.recovery is not None and r.recovery.reused_tokens > 0 for r in replies)


# -- requests that do not end well -------------------------------------------------------------------------------------


async def test_cancelling_a_task_aborts_its_request_and_the_episode_goes_on(cache: AsyncAgentCache) -> None:
    episode = cache.episode("cancel")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    task = asyncio.create_task(episode.generate(chat("13 grams"), **ENDLESS))
    while not unfinished(cache):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert unfinished(cache) == 0
    await idle(cache)
    after = await episode.generate(chat("14 grams"), max_tokens=2)
    assert after.parent == first.version and after.recovery is not None and after.recovery.reason is None
    assert [r.recovery is None for r in episode.history()] == [False, True, False]


async def test_closing_a_stream_aborts_its_request(cache: AsyncAgentCache) -> None:
    episode = cache.episode("closed stream")
    chunks = episode.stream(chat("12 grams"), **ENDLESS)
    first = await anext(chunks)
    await chunks.aclose()
    assert unfinished(cache) == 0
    await idle(cache)
    (record,) = episode.history()
    assert record.reply_tokens == len(first.token_ids) > 0


async def test_a_timeout_aborts_its_request_and_frees_its_blocks(cache: AsyncAgentCache) -> None:
    with pytest.raises(RequestTimeout, match=r"timeout=0\.05 s"):
        await cache.episode("timeout").generate(chat("12 grams"), timeout=0.05, **ENDLESS)
    assert unfinished(cache) == 0
    await idle(cache)


async def test_a_timeout_that_is_not_reached_changes_nothing(cache: AsyncAgentCache) -> None:
    reply = await cache.generate(LONG, max_tokens=4, timeout=600)
    assert len(reply.token_ids) == 4


async def test_an_episode_is_reopened_from_a_durable_store_only(cache: AsyncAgentCache) -> None:
    with pytest.raises(AgentCacheError, match="no durable store"):
        await cache.reopen("thread-1")


async def test_flush_waits_for_saves_in_memory(cache: AsyncAgentCache) -> None:
    episode = cache.episode("flushed")
    reply = await episode.generate(LONG, max_tokens=2)
    assert reply.recovery is not None and reply.recovery.saved == "pending"
    assert await cache.flush()
    stats = (await cache.stats())["ranks"]
    assert all(rank["pending_saves"] == 0 and rank["index"]["open_saves"] == 0 for rank in stats)
    await idle(cache)
    again = await episode.generate([*LONG, 5], max_tokens=1, policy="prefix_cache")
    assert again.recovery is not None and again.recovery.restored_tokens == len(LONG)


# -- the engine's death; the last tests of this module, for they replace its engine ------------------------------------


async def test_no_thread_of_enginecore_is_bound_to_one_core(cache: AsyncAgentCache) -> None:
    (pid,) = cache.pids
    cores = os.sched_getaffinity(0)
    threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset(cores)}


async def test_a_dead_engine_is_a_clear_error_and_a_restart_keeps_the_history(cache: AsyncAgentCache) -> None:
    episode = cache.episode("death")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    pids = cache.pids
    open_request = asyncio.create_task(episode.generate(chat("13 grams"), **ENDLESS))
    while not unfinished(cache):
        await asyncio.sleep(0.01)
    assert len(pids) == 1  # the worker lives in EngineCore
    os.kill(pids[0], signal.SIGKILL)
    async with asyncio.timeout(120):
        with pytest.raises(EngineDeadError, match=r"has died.*cache\.restart\(\)"):
            await open_request
    with pytest.raises(EngineDeadError, match="has died"):
        await cache.generate(LONG, max_tokens=1)
    with pytest.raises(EngineDeadError, match="has died"):
        await cache.stats()
    await cache.restart()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert set(cache.pids).isdisjoint(pids)
    after = await episode.generate(chat("49 grams"), max_tokens=2)
    assert after.parent == first.version and after.recovery is not None and after.recovery.exact
    assert "is unknown or was evicted" in str(after.recovery.reason)
    again = await episode.generate(chat("50 grams"), max_tokens=2)
    assert again.parent == after.version and again.recovery is not None and again.recovery.reused_tokens > 0
    assert len(episode.history()) == 4


@pytest.mark.slow
async def test_a_worker_in_a_process_of_its_own_that_dies_is_a_clear_error_too(tiny: Callable[[str], Path]) -> None:
    own = {"engine_args": {"distributed_executor_backend": "mp"}}
    async with AsyncAgentCache(tiny("llama"), **SETTINGS, **own) as cache:
        core, worker = cache.pids
        open_request = asyncio.create_task(cache.generate(LONG, **ENDLESS))
        while not unfinished(cache):
            await asyncio.sleep(0.01)
        os.kill(worker, signal.SIGKILL)
        async with asyncio.timeout(120):
            with pytest.raises(EngineDeadError, match=r"has died.*cache\.restart\(\)"):
                await open_request
        await cache.restart()
        assert set(cache.pids).isdisjoint((core, worker)) and not psutil.pid_exists(core)


async def test_closing_twice_leaves_no_process_and_open_requests_fail(cache: AsyncAgentCache) -> None:
    pids = cache.pids
    assert pids and all(psutil.pid_exists(pid) for pid in pids)
    open_request = asyncio.create_task(cache.generate(LONG, **ENDLESS))
    while not unfinished(cache):
        await asyncio.sleep(0.01)
    await cache.close()
    await cache.close()
    with pytest.raises(EngineDeadError, match="was stopped"):
        await open_request
    assert not any(psutil.pid_exists(pid) for pid in pids) and cache.pids == []
    with pytest.raises(AgentCacheError, match="not started or is closed"):
        await cache.generate(LONG)
