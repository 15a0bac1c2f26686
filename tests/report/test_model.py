"""What the page shows of a log: labels, stages, savings, families."""

from __future__ import annotations

import pytest

from agentcache.events import ReplyEnded
from agentcache.labels import count_labels
from agentcache.report.log import entries_of
from agentcache.report.model import STAGES, Report, Row, build_report
from tests.report.logs import EDIT, FORK, ended, events, revised


@pytest.fixture
def report() -> Report:
    return build_report(entries_of(events()))


def rows_of(report: Report) -> dict[str, Row]:
    return {row.entry.revised.version: row for family in report.families for row in family.rows}


def test_a_fork_stands_in_the_family_of_its_parent(report: Report) -> None:
    assert [family.episodes for family in report.families] == [("thread-1", "fork/2"), ("other",)]
    assert [family.totals.versions for family in report.families] == [5, 1]
    assert report.totals.forks == 1 and report.totals.episodes == 3


def test_counts_are_those_of_the_recovery_report(report: Report) -> None:
    assert rows_of(report)["v2"].counts == {"P": 40, "X": 10, "R": 32, "F": 121, "N": 3}


def test_stages_sum_to_the_time_to_first_token(report: Report) -> None:
    stages = rows_of(report)["v2"].stages
    assert tuple(stages) == STAGES and sum(stages.values()) == pytest.approx(EDIT["ttft_ms"])
    assert stages["recompute"] == 20.0 and stages["rest"] == pytest.approx(60 - 0.5 - 0.75 - 4 - 20)


def test_time_is_estimated_by_the_requests_that_reused_nothing(report: Report) -> None:
    assert report.token_requests == 2 and report.token_ms == pytest.approx((400 + 128) / 264)
    # 42 + 3 computed and 121 saved, less what it took
    assert rows_of(report)["v2"].saved_ms == pytest.approx(2.0 * (45 + 121) - 60)


def test_an_estimate_of_auto_comes_before_that_of_the_log() -> None:
    told = [ended("v", recovery={**EDIT, "estimate": {"exact_ms": 500.0, "edit_local_ms": 70.0}})]
    (family,) = build_report(entries_of([revised("v", None, 206), *told])).families
    assert family.rows[0].saved_ms == pytest.approx(440.0)


def test_nothing_is_estimated_where_nothing_tells_how_long_a_token_takes() -> None:
    only = build_report(entries_of([revised("v", None, 206), ended("v", recovery=EDIT)]))
    assert only.token_ms is None and only.totals.saved_ms is None and only.totals.saved_tokens == 121


def test_lost_rows_are_not_saved() -> None:
    lost = ended("v", recovery={**EDIT, "lost_tokens": 21})
    assert build_report(entries_of([revised("v", None, 206), lost])).totals.saved_tokens == 100


def test_totals_are_sums(report: Report) -> None:
    totals = report.totals
    assert (totals.versions, totals.resumes, totals.approximate) == (6, 3, 2)
    assert totals.saved_tokens == EDIT["reused_tokens"] + FORK["reused_tokens"] == 181
    assert totals.computed_tokens == 200 + 45 + 30 + 42 + 64
    assert totals.saved_share == pytest.approx(181 / (181 + 381))
    assert (totals.checks, totals.strikes) == (1, 1)


def test_a_version_without_a_report_shows_what_its_diff_tells(report: Report) -> None:
    row = rows_of(report)["v4"]
    assert row.labels == "P*50 X*10 S*170 N*10" and row.stages == {}


def test_an_older_log_shows_what_counts_and_diff_tell() -> None:
    def without_rows(event: object) -> object:
        if isinstance(event, ReplyEnded):
            event.recovery.update(rows="", precisions="")
        return event

    rows = rows_of(build_report(entries_of(map(without_rows, events()))))  # type: ignore[arg-type]
    assert rows["v1"].labels == "N*200"
    assert rows["v2"].labels == "P*40 X*10 S*153 N*3"
    assert rows["v3"].labels == "P*208 N*42"


def test_labels_cover_each_prompt(report: Report) -> None:
    for row in rows_of(report).values():
        assert sum(count_labels(row.labels).values()) == row.entry.revised.new_len


def test_a_log_of_nothing_is_a_report_of_nothing() -> None:
    empty = build_report([])
    assert empty.families == () and empty.totals.versions == 0 and empty.totals.saved_share == 0
