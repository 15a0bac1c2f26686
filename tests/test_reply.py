"""The recovery report as one line."""

from __future__ import annotations

from agentcache.reply import RecoveryReport


def test_a_recovery_prints_its_tokens_and_stages_in_one_line() -> None:
    report = RecoveryReport(
        policy="edit_local",
        requested_policy="edit_local",
        prompt_tokens=4084,
        prefix_tokens=1228,
        fresh_tokens=40,
        repair_tokens=32,
        reused_tokens=2780,
        new_tokens=4,
        plan_ms=0.42,
        restore_ms=11.2,
        recompute_ms=52.0,
        ttft_ms=96.4,
    )
    assert str(report) == (
        "edit_local: P 1228 | X 40 | R 32 | F 2780 (68 % reused) | N 4 · plan 0.4 ms · restore 11 ms · recompute 52 ms · TTFT 96 ms"
    )


def test_a_fallback_prints_what_was_asked_for_and_why_it_was_not_done() -> None:
    report = RecoveryReport(requested_policy="edit_local", reason="parent 'v1' is unknown or was evicted", new_tokens=7)
    assert str(report) == (
        "prefix_cache: P 0 | X 0 | R 0 | F 0 | N 7 · edit_local was asked for; parent 'v1' is unknown or was evicted"
    )


def test_a_report_is_built_from_the_wire_and_ignores_fields_of_newer_engines() -> None:
    assert RecoveryReport.model_validate({"version": "v", "from_the_future": 1}).version == "v"
