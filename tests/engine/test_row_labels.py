"""A report's labels of rows, by a scheduler half without an engine: they sum to its counts, whatever became of the request."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache.engine.wire import Recovery
from agentcache.labels import count_labels, parse_labels
from tests.engine.desk import Desk

PARENT = [*range(1000, 1400)]
EDITED = [*PARENT[:100], *range(5000, 5010), *PARENT[130:], *range(6000, 6004)]


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.serve(PARENT, {"version": "v1"})
    desk.drain()
    return desk


def counted(report: Recovery) -> dict[str, int]:
    """Returns a report's counts that are not 0, by label."""
    counts = {
        "P": report.prefix_tokens,
        "X": report.fresh_tokens,
        "R": report.repair_tokens,
        "F": report.reused_tokens,
        "N": report.new_tokens,
    }
    return {label: rows for label, rows in counts.items() if rows}


def test_a_first_version_is_all_new() -> None:
    report = Desk().serve(PARENT, {"version": "v1"})
    assert report.rows == "N*400" and report.precisions == ""


def test_an_edit_is_labelled_row_by_row(desk: Desk) -> None:
    report = desk.serve(EDITED, {"version": "v2", "parent": "v1", "policy": "edit_local", "options": {"k": 32}})
    assert report.rows == "P*100 X*10 R*32 F*238 N*4"
    assert report.precisions == "exact*100 -*42 exact*238 -*4"
    assert count_labels(report.rows) == counted(report)


@pytest.mark.parametrize("policy", ["prefix_cache", "direct_reuse", "edit_local", "epic", "structural", "random"])
def test_labels_sum_to_the_counts(desk: Desk, policy: str) -> None:
    report = desk.serve(EDITED, {"version": "v2", "parent": "v1", "policy": policy})
    assert count_labels(report.rows) == counted(report)
    assert sum(counted(report).values()) == len(EDITED) == [*parse_labels(report.rows)][-1].stop


def test_rows_of_sources_are_reused_rows(desk: Desk) -> None:
    chunk = [*range(7000, 7060)]
    desk.serve(chunk, {"version": "chunk"})
    desk.drain()
    prompt = [*range(8000, 8020), *chunk, *range(8100, 8110)]
    report = desk.serve(prompt, {"version": "v2", "sources": ["chunk"], "policy": "direct_reuse"})
    assert report.rows == "X*20 F*60 N*10" and report.precisions == "-*20 exact*60 -*10"


@pytest.mark.parametrize("payload", [{"version": "v2", "parent": "gone"}, {"version": "v1"}, {"nonsense": 1}])
def test_a_request_without_a_plan_is_new(desk: Desk, payload: dict[str, Any]) -> None:
    report = desk.serve(EDITED, payload)
    assert report.rows == f"N*{len(EDITED)}" and counted(report) == {"N": len(EDITED)}
    assert report.reason is not None
