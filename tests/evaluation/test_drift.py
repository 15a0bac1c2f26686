"""`agentcache eval drift`: which pairs are chosen, what is said of them, and that nothing is measured twice."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentcache.cli import app
from agentcache.episodes.diff import diff_tokens
from agentcache.errors import ConfigError
from agentcache.evaluation import cli_drift
from agentcache.evaluation.drift import (
    KINDS,
    DriftRun,
    cells_of,
    choose_pairs,
    layers_of,
    measure_model,
    uses,
    without_doubles,
)
from agentcache.evaluation.drift_report import plot_drift, sections
from agentcache.profiling.datasets import load_dataset
from agentcache.profiling.edits import Message
from agentcache.profiling.model import ModelFingerprint
from agentcache.work_file import WorkFile

MODEL = ModelFingerprint(
    name="tiny", architecture="Tiny", layers=2, kv_heads=1, head_dim=8, dtype="float32", hash="ab" * 16
)
CONSOLE = Console(file=io.StringIO())


def settings(tmp_path: Path, **changes: Any) -> DriftRun:
    return DriftRun(models=("tiny",), out=tmp_path / "drift.json", **({"pairs": 6, "max_tokens": 1500} | changes))


def words(messages: Sequence[Message]) -> list[int]:
    """Stands in for a tokenizer: equal words have equal ids."""
    return [sum(map(ord, word)) * 31 % 30_000 for message in messages for word in message["content"].split()]


class FakeEngine:
    """Similarity rises with distance; layer 0 does not drift."""

    def __init__(self) -> None:
        self.calls = 0

    def stats(self) -> dict[str, Any]:
        return {"engine": {"dtype": "float32"}}

    def probe(self, name: str, old: list[int], new: list[int]) -> dict[str, Any]:
        assert name == "drift"
        self.calls += 1
        run = diff_tokens(old, new).suffix[-1]
        blocks = -(-run.length // 32)
        line = [1 - 0.3 / (1 + at) - self.calls / 1000 for at in range(blocks)]
        return {"lengths": {"suffix": run.length}, "block": 32} | {kind: [[1.0] * blocks, line] for kind in KINDS}


def test_pairs_are_real_edits_that_data_sets_take_turns_in(tmp_path: Path) -> None:
    sample = load_dataset()
    first, second = (sample.tasks[at::2] for at in (0, 1))
    halves = [replace(sample, tasks=first, hash="a"), replace(sample, tasks=second, hash="b")]
    pairs = choose_pairs(halves, words, settings(tmp_path))
    assert [use.count for use in uses(halves, pairs)] == [3, 3]
    assert len({pair.id for pair in pairs}) == 6
    for pair in pairs:
        assert pair.old != pair.new and max(len(pair.old), len(pair.new)) <= 1500
        assert diff_tokens(pair.old, pair.new).suffix[-1].length >= 128
    assert choose_pairs(halves, words, settings(tmp_path)) == pairs
    assert choose_pairs(halves, words, settings(tmp_path, seed=2)) != pairs
    assert [len(each.tasks) for each in without_doubles([sample, sample])] == [12, 0]


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the data is too short: \d+ edits of it leave 128 tokens .* 500 are wanted"):
        choose_pairs([load_dataset()], words, settings(tmp_path, pairs=500))


def test_a_pair_is_measured_once_and_an_engine_is_started_only_to_measure(tmp_path: Path) -> None:
    pairs = choose_pairs([load_dataset()], words, settings(tmp_path))
    engine, starts = FakeEngine(), []

    def open_engine() -> Any:
        starts.append(1)
        return nullcontext(engine)

    work = tmp_path / "work.jsonl"
    rows = measure_model(pairs, MODEL, open_engine, WorkFile(work), CONSOLE)
    again = measure_model(pairs, MODEL, open_engine, WorkFile(work), CONSOLE)
    assert again == rows and (engine.calls, len(starts)) == (6, 1)
    other = MODEL.model_copy(update={"hash": "cd" * 16})
    measure_model(pairs, other, open_engine, WorkFile(work), CONSOLE)
    assert engine.calls == 12, "another model is measured by itself"


def test_cells_are_medians_and_quartiles_over_the_pairs_that_reach_so_far() -> None:
    lines = [[0.5, 0.9], [0.6, 0.8], [0.7]]
    rows = [{"block": 32} | {kind: [[1.0] * len(line), line] for kind in KINDS} for line in lines]
    near, far = cells_of("m", rows)
    assert (near["distance"], near["n"], near["value"], near["value_iqr"]) == (0, 3, 0.8, [0.775, 0.825])
    assert (far["distance"], far["n"], far["key"], far["key_iqr"]) == (32, 2, 0.925, [0.9125, 0.9375])
    first, second = layers_of("m", rows)
    assert (first["value_first"], first["key_last"]) == (1, 1)
    assert (second["value_first"], second["value_last"]) == (0.6, 0.8)


def test_the_report_shows_near_blocks_and_the_last_one_and_a_line_a_model(tmp_path: Path) -> None:
    rows = [{"block": 32} | {kind: [[0.5 + 0.1 * at for at in range(5)]] for kind in KINDS} for _ in range(4)]
    cells = cells_of("a", rows) + cells_of("b", rows[:1])
    by_distance, by_layer = sections(cells, layers_of("a", rows))
    assert [(row["model"], row["block"]) for row in by_distance.rows] == [(m, b) for m in "ab" for b in (0, 1, 2, 4)]
    assert len(by_layer.rows) == 1
    for path in plot_drift(cells, tmp_path / "drift.json"):
        assert path.stat().st_size > 5000


@pytest.mark.engine
def test_quick_shows_what_must_hold_and_measures_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "drift.json"
    command = ["eval", "drift", "--quick", "--plots", "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["pairs"] == 2 and found["provenance"]["model"]["name"] == "smollm2"
    assert found["provenance"]["data"][0]["count"] == 2
    near, *_, far = found["cells"]
    assert near["n"] == 2 and {"model", "distance", "value", "value_iqr", "key", "key_iqr"} <= near.keys()
    assert near["value"] < far["value"] <= 1 and near["key_in_place"] < near["key"] <= 1
    first = found["layers"][0]
    assert first["value_first"] > 0.9999 and first["key_first"] > 0.999, "layer 0 knows no context"
    assert found["layers"][-1]["value_first"] < first["value_first"]
    assert (tmp_path / "drift-drift.png").exists() and "By distance" in (tmp_path / "drift.md").read_text()

    monkeypatch.setattr(cli_drift, "_engine", lambda *_: pytest.fail("everything was measured"))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["cells"] == found["cells"]
