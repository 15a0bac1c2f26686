from __future__ import annotations

import io

from rich.console import Console

from agentcache.engine.wire import Recovery
from agentcache.events import Event, EventBus, PromptRevised, ReplyEnded
from agentcache.report.table import ResumeTable
from agentcache.types import AlignedRun, RevisionKind


def first(episode: str) -> list[Event]:
    report = Recovery(
        prefix_tokens=0, new_tokens=100, prompt_tokens=100, ttft_ms=50.0, policy="edit_local", rows="N*100"
    )
    return [
        PromptRevised(
            episode=episode, version="v1", parent=None, kind=RevisionKind.FIRST, prefix=0, aligned=(), old_len=0, new_len=100,
            labels=(), diff_ms=0.0,
        ),
        ReplyEnded(episode=episode, version="v1", finish_reason="stop", reply_tokens=1, recovery=report.model_dump(mode="json")),
    ]  # fmt: skip


def second(episode: str) -> list[Event]:
    report = Recovery(
        prefix_tokens=20, fresh_tokens=10, repair_tokens=8, reused_tokens=60, new_tokens=2, prompt_tokens=100, ttft_ms=9.0,
        policy="edit_local", rows="P*20 X*10 R*8 F*60 N*2",
    )  # fmt: skip
    return [
        PromptRevised(
            episode=episode, version="v2", parent="v1", kind=RevisionKind.TOOL_RESULT, prefix=20,
            aligned=(AlignedRun(30, 30, 70),), old_len=100, new_len=100, labels=(), diff_ms=0.1,
        ),
        ReplyEnded(episode=episode, version="v2", finish_reason="stop", reply_tokens=1, recovery=report.model_dump(mode="json")),
    ]  # fmt: skip


def printed(table: ResumeTable) -> list[list[str]]:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as shown:
        table.show(console)
    return [line.split() for line in shown.get().splitlines() if line.strip()]


def test_a_table_has_a_row_a_version_and_their_sum() -> None:
    bus = EventBus()
    with ResumeTable(bus) as table:  # type: ignore[arg-type]  # all that it needs of a cache
        for event in (*first("thread"), *second("thread")):
            bus.emit(event)
        assert [row.saved_tokens for row in table.rows] == [0, 60]
        assert table.totals.resumes == 1 and table.totals.saved_tokens == 60
        lines = printed(table)
    assert ["thread", "first", "100", "0", "0", "0", "0", "100", "50", "ms", "–"] in lines
    assert ["thread", "tool_result", "100", "20", "10", "8", "60", "2", "9", "ms", "60", "(75%)"] in lines
    assert ["1", "resume", "200", "59", "ms", "60", "(33%)"] in lines


def test_a_closed_table_follows_no_more() -> None:
    bus = EventBus()
    table = ResumeTable(bus)  # type: ignore[arg-type]
    table.close()
    table.close()
    for event in first("thread"):
        bus.emit(event)
    assert table.rows == []


def test_a_long_id_is_cut_at_its_beginning() -> None:
    bus = EventBus()
    with ResumeTable(bus) as table:  # type: ignore[arg-type]
        for event in first("x" * 60 + "-end"):
            bus.emit(event)
        assert any(line[0].startswith("…") and line[0].endswith("x-end") for line in printed(table))
