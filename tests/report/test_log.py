"""What is read of an event log, version by version."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.errors import ConfigError
from agentcache.event_log import JsonlEventLog
from agentcache.events import KVPaused, KVResumed, PolicyFellBack, ReplyEnded
from agentcache.report.log import Pause, entries_of, read_log
from agentcache.types import RevisionKind
from tests.report.logs import EDIT, FIRST, T0, ended, events, revised


def test_versions_come_in_the_order_in_which_they_were_recorded() -> None:
    assert [entry.revised.version for entry in entries_of(events())] == ["v1", "v2", "f1", "v3", "v4", "a1"]


def test_a_version_has_its_report_its_reply_and_what_the_guard_found() -> None:
    entry = entries_of(events())[1]
    assert entry.recovery is not None and entry.recovery.rows == EDIT["rows"]
    assert entry.ended is not None and entry.ended.reply_tokens == 3
    assert [check.strike for check in entry.checks] == [True]


def test_a_version_without_a_reply_has_no_report() -> None:
    entry = entries_of(events())[4]
    assert entry.revised.version == "v4" and entry.recovery is None and entry.ended is None


def test_pauses_last_until_they_are_resumed_or_the_next_version_begins() -> None:
    entry = entries_of(events())[1]
    assert entry.pauses == (Pause("call_1", "a search", 4.0), Pause("v1", "the reply ended", 7.0))


def test_a_log_without_replies_ends_has_the_report_of_its_resumes() -> None:
    older = [event for event in events() if not isinstance(event, ReplyEnded)]
    entries = {entry.revised.version: entry for entry in entries_of(older)}
    assert entries["v1"].recovery is None
    assert entries["v2"].recovery is not None and entries["v2"].recovery.reused_tokens == 121


def test_a_resume_of_a_version_that_the_log_does_not_have_is_left_out() -> None:
    assert entries_of([KVResumed(episode="e", version="gone", recovery={"reused_tokens": 3})]) == []


def test_a_fall_back_stands_with_the_newest_version_of_its_episode() -> None:
    fall = PolicyFellBack(scope="episode", episode="e", policy="p", reason="a KL of 3")
    entries = entries_of([revised("x", None, 9, episode="e"), fall, revised("y", "x", 9, episode="e")])
    assert [entry.falls for entry in entries] == [(fall,), ()]


def test_a_version_that_a_later_process_opens_again_is_the_one_that_it_was() -> None:
    first = [revised("v1", None, 200), ended("v1", recovery=FIRST)]
    pause = KVPaused(episode="thread-1", key="v1", version="v1", reason="the reply ended", time_s=T0 + 1)
    again = revised("v1", None, 203, kind=RevisionKind.FIRST, labels=(), time_s=T0 + 60)
    turn = revised("v2", "v1", 206, [(0, 0, 40)], old_len=203, time_s=T0 + 61)
    assert entries_of([*first, pause, again]) == entries_of(first)
    known, later = entries_of([*first, pause, again, turn])
    assert known == entries_of(first)[0] and known.ended is not None
    assert later.revised.parent == "v1" and later.pauses == (Pause("v1", "the reply ended", 60.0),)


def test_a_fork_that_is_opened_again_keeps_its_parent() -> None:
    fork = [revised("v1", None, 9, episode="a"), revised("f1", "v1", 9, [(0, 0, 4)], old_len=9, episode="b")]
    assert entries_of([*fork, revised("f1", None, 9, episode="b", kind=RevisionKind.FIRST)]) == entries_of(fork)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonlEventLog(path) as log:
        for event in events():
            log(event)
    assert read_log(path) == entries_of(events())


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1 is not an event"):
        read_log(path)
