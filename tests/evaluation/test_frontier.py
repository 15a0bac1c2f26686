"""`agentcache eval frontier`: stops against boundaries, and what is compared at equal cost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.cli import app
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.evaluation.cli_frontier import matches_in
from agentcache.evaluation.frontier import Stops, matched, one_edit, stop_cells, stop_key
from agentcache.profiling.measure import Pair

OLD = list(range(300))
PAIR = Pair("a", "sample", "t", OLD, [*range(40), 7777, *range(41, 300)])


class FakeCache:
    """Rows drift for 64 tokens; a policy recomputes `stop` tokens."""

    def __init__(self, reason: str | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any] | None, str | None]] = []
        self.dropped = 0
        self.reason = reason

    def stats(self) -> dict[str, Any]:
        return {"engine": {"dtype": "float32"}}

    def probe(self, name: str, old: list[int], new: list[int]) -> dict[str, Any]:
        assert (name, old, new) == ("drift", PAIR.old, PAIR.new)
        layers = [[0.9, 0.99, 1.0, 1.0], [0.8, 0.97, 1.0, 1.0], [0.7, 0.98, 0.999, 1.0]]
        return {"lengths": {"suffix": 128}, "block": 32, "value": layers}

    def reset_prefix_cache(self) -> bool:
        return True

    def flush(self) -> bool:
        return True

    def episode(self, name: str) -> Any:
        def generate(ids: list[int], *, policy: str, **options: Any) -> Any:
            self.asked.append((policy, options.get("policy_options"), options.get("parent")))
            report = SimpleNamespace(repair_tokens=32 * len(self.asked), recompute_ratio=0.25, reason=self.reason)
            return SimpleNamespace(version="v1", recovery=report)

        def drop() -> None:
            self.dropped += 1

        return SimpleNamespace(generate=generate, drop=drop)


ARMS: dict[str, dict[str, Any]] = {"frontier": {}, "frontier:threshold=0.9": {"threshold": 0.9}}


def test_a_pair_shows_its_drift_and_each_arms_stop_and_arms_take_turns() -> None:
    cache = FakeCache()
    measure = Stops(cache, ARMS)
    row = measure(PAIR, 0)
    assert row["deviation"] == pytest.approx([0.2, 0.02, 0.0, 0.0]) and (row["suffix"], row["block"]) == (128, 32)
    assert [name for name, *_ in cache.asked] == ["prefix_cache", "frontier", "frontier"]
    assert [options for _, options, _ in cache.asked] == [None, None, {"threshold": 0.9}]
    assert [parent for *_, parent in cache.asked] == [None, "v1", "v1"]
    assert row["arms"]["frontier"] == {"stop": 64, "recompute_ratio": 0.25}
    bounded = FakeCache()
    Stops(bounded, {"frontier": {"most_tokens": 4096}, "frontier:first=8": {"most_tokens": 64}})(PAIR, 0)
    assert [options for _, options, _ in bounded.asked[1:]] == [{"most_tokens": 96}, {"most_tokens": 64}]
    measure(PAIR, 1)
    assert [options for _, options, _ in cache.asked[3:]] == [None, {"threshold": 0.9}, None] and cache.dropped == 2


def test_a_policy_that_the_engine_did_not_follow_is_an_error_and_the_episode_is_dropped() -> None:
    cache = FakeCache("nothing is stored")
    with pytest.raises(AgentCacheError, match="frontier on the edit 'a': nothing is stored"):
        Stops(cache, ARMS)(PAIR, 0)
    assert cache.dropped == 1


def row(stop: int, deviation: list[float]) -> dict[str, Any]:
    return {
        "suffix": 32 * len(deviation),
        "block": 32,
        "deviation": deviation,
        "arms": {"frontier": {"stop": stop, "recompute_ratio": stop / (32 * len(deviation))}},
    }


def test_stops_lie_before_at_or_behind_the_boundary() -> None:
    rows = [row(32, [0.2, 0.2, 0.0, 0.0]), row(64, [0.2, 0.2, 0.0, 0.0]), row(128, [0.0] * 4), row(96, [0.1] * 4)]
    whole = row(0, [0.2, 0.0, 0.0, 0.0])
    whole["arms"]["frontier"]["recompute_ratio"] = 1.0
    assert stop_cells([whole], "m", tau_v=0.005, gamma=0.98)[0]["stop"] == 128
    (cell,) = stop_cells(rows, "m", tau_v=0.005, gamma=0.98)
    assert (cell["n"], cell["stop"], cell["boundary"]) == (4, 80, (64 + 64 + 0 + 128) / 4)
    assert cell["covers"] == 0.5 and cell["missed"] == 16 and cell["spent"] == 32  # −32, 0, 128, −32
    assert cell["past_median"] == -16 and cell["recompute_ratio"] == pytest.approx((0.25 + 0.5 + 1 + 0.75) / 4)


WINDOWS = {"patchkv:window=16:kappa=0@512": [0.0, 0.2], "patchkv:window=64:kappa=0@512": [1.0, 0.8]}
RATIOS = {"patchkv:window=16:kappa=0@512": [0.1, 0.1], "patchkv:window=64:kappa=0@512": [0.3, 0.5]}


def is_window(arm: str) -> bool:
    return arm.startswith("patchkv")


def test_windows_are_interpolated_to_the_frontiers_mean_share() -> None:
    found = matched({**WINDOWS, "frontier@512": [0.7, 0.9]}, {**RATIOS, "frontier@512": [0.1, 0.4]}, is_window)
    (one,) = found
    assert one["recompute_ratio"] == one["window_ratio"] == 0.25 and not one["extrapolated"]
    assert one["window_value"] == 0.5 and one["value"] == 0.8  # halfway between 0.1 and 0.4
    assert one["difference"] == pytest.approx(0.3) and one["between"] == [*WINDOWS]
    low, high = one["difference_ci"]
    assert low <= 0.3 <= high and low == pytest.approx(0.2) and high == pytest.approx(0.4)


@pytest.mark.parametrize(("share", "nearest"), [(0.05, 0), (0.9, 1)])
def test_outside_of_their_shares_the_nearest_window_is_taken_and_that_is_said(share: float, nearest: int) -> None:
    arm = "frontier:threshold=0.99@512"
    (one,) = matched({**WINDOWS, arm: [0.7, 0.9]}, {**RATIOS, arm: [share, share]}, is_window)
    assert one["extrapolated"] and one["between"] == [[*WINDOWS][nearest]] * 2
    assert one["window_value"] == sum([*WINDOWS.values()][nearest]) / 2


def test_items_that_an_arm_did_not_measure_are_left_out() -> None:
    items = {**WINDOWS, "frontier@512": [0.7, None]}
    (one,) = matched(items, {**RATIOS, "frontier@512": [0.2, None]}, is_window)
    assert one["n"] == 1 and one["window_value"] == 0.5
    with pytest.raises(ConfigError, match="1 arms of frontier and 0 fixed windows"):
        matched({"frontier@512": [1.0]}, {"frontier@512": [0.1]}, is_window)


def test_results_of_both_commands_are_read(tmp_path: Path) -> None:
    paired, qa, other = (tmp_path / name for name in ("paired.json", "qa.json", "other.json"))
    mr, ratio = {**WINDOWS, "frontier@512": [0.7, 0.9]}, {**RATIOS, "frontier@512": [0.1, 0.4]}
    paired.write_text(
        json.dumps({"per_item": [{"condition": "derived", "distance": 250, "mr": mr, "recompute_ratio": ratio}]})
    )
    qa.write_text(json.dumps({"per_item": {"id": ["a", "b"], "f1": mr, "recompute_ratio": ratio}}))
    assert [(m["result"], m["of"]) for path in (paired, qa) for m in matches_in(path)] == [
        ("paired.json", "derived, d = 250"),
        ("qa.json", "F1"),
    ]
    for text in ("{", "[]", '{"per_item": 3}', json.dumps({"per_item": {"f1": {}, "recompute_ratio": {}}})):
        other.write_text(text)
        with pytest.raises(ConfigError, match=r"other\.json"):
            matches_in(other)


def test_only_edits_that_leave_one_run_are_taken_and_keys_tell_options_apart() -> None:
    two = list(PAIR.new)
    two[200] = 8888
    assert one_edit(PAIR) and not one_edit(Pair("b", "sample", "t", OLD, two))
    keys = {stop_key(PAIR, "m", arms) for arms in (ARMS, {"frontier": {}}, {"frontier": {"threshold": 0.9}})}
    assert len(keys) == 3 and stop_key(PAIR, "m", ARMS) in keys


@pytest.mark.engine
@pytest.mark.usefixtures("smollm2_path")
def test_quick_shows_that_it_works_and_measures_nothing_again(tmp_path: Path) -> None:
    out = tmp_path / "frontier.json"
    command = [
        "eval",
        "frontier",
        "--quick",
        "--policies",
        "frontier:length_model=null:most_tokens=4096,edit_local",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    frontier, local = found["cells"]
    assert (frontier["n"], local["policy"], local["stop"]) == (2, "edit_local", 32)
    assert frontier["stop"] >= 32 and 0 <= frontier["covers"] <= 1 and frontier["boundary"] > 0
    assert 0 < found["tau_v"] < 0.1 and found["matched"] == []
    assert out.with_suffix(".md").read_text().count("frontier:length") >= 1
    work = out.with_name("frontier.json.work.jsonl").read_bytes()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert out.with_name("frontier.json.work.jsonl").read_bytes() == work
