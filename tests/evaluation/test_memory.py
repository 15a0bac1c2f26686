"""`agentcache eval memory`: arms and their budgets, prompts, cells; and a quick run on the real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.cli import app
from agentcache.errors import ConfigError
from agentcache.evaluation import memory as memory_module
from agentcache.evaluation.memory import MemoryRun, select_units
from agentcache.evaluation.memory_arms import FULL, POLICIES, MemoryArm, arms_of
from agentcache.evaluation.memory_cells import cells_of, pairs_of, retrieval_of, shift_of
from agentcache.evaluation.memory_data import choose, load_memories
from agentcache.evaluation.memory_report import plot_memory, plot_shift, sections
from agentcache.recovery import get_policy

ARMS = arms_of(["mean_shift", "direct_reuse"], [0.1, 0.3], ["exact"])


def answer(f1: float, ttft: float = 100.0, **more: Any) -> dict[str, Any]:
    return {
        "f1": f1,
        "em": float(f1 == 1),
        "rouge1": f1,
        "bleu1": f1,
        "ttft_ms": ttft,
        "recompute_ratio": 0.2,
        "source_tokens": 800,
        "aligned_tokens": 1000,
        "answer_tokens": 5,
        "stored": {"exact": 30, "k8v4": 10},
        "reason": None,
        "kl": 0.5,
    } | more


def row(number: int, category: str = "temporal", **f1: float) -> dict[str, Any]:
    values = {FULL: 0.8, "mean_shift r=0.1": 0.6, "mean_shift r=0.3": 0.8, "direct_reuse": 0.2} | f1
    arms = {name: answer(value, 50.0 if name != FULL else 100.0) for name, value in values.items()}
    return {
        "id": f"q{number}",
        "dataset": "locomo",
        "category": category,
        "recall": 0.5 if number else None,
        "units": 6,
        "prompt_tokens": 1000,
        "chunk_tokens": 900,
        "arms": arms,
        "seconds": 2.0,
    }


def shifted(left: float) -> dict[str, Any]:
    side = {
        "norm": [100.0, 100.0],
        "residual": [0.0, 4.0],
        "left": [0.0, left],
        "without_probes": [0.0, 6.0],
        "without_common": [0.0, 1.0],
    }
    return {
        "id": "q",
        "dataset": "locomo",
        "share": 0.1,
        "precision": "exact",
        "probes": 10,
        "kept": 90,
        "key": side,
        "value": side,
    }


def test_each_policy_takes_each_share_and_precision_and_one_without_a_budget_is_taken_once() -> None:
    arms = arms_of(["cacheblend", "direct_reuse", "epic:k=32"], [0.1, 0.3], ["exact", "kivi2"])
    assert [arm.name for arm in arms] == [
        FULL,
        "cacheblend r=0.1",
        "cacheblend r=0.3",
        "cacheblend r=0.1 @kivi2",
        "cacheblend r=0.3 @kivi2",
        "direct_reuse",
        "direct_reuse @kivi2",
        "epic:k=32",
        "epic:k=32 @kivi2",
    ]
    assert [arm.r for arm in arms] == [1.0, 0.1, 0.3, 0.1, 0.3, 0.0, 0.0, None, None]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((["cacheblend"], [1.5], ["exact"]), "share r=1.5 is not allowed"),
        ((["cacheblend"], [0.1], ["int3"]), "precisions .'int3'. are not allowed"),
        ((["prefix_cache"], [0.1], ["exact"]), "is exact and takes nothing of chunks"),
        (([FULL], [0.1], ["exact"]), "no policy is compared"),
        ((["nobody"], [0.1], ["exact"]), "nobody"),
    ],
)
def test_arms_that_are_none_are_refused(arguments: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        arms_of(*arguments)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "direct_reuse"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.95])
def test_a_share_is_within_the_options_that_each_policy_takes(policy: str, share: float) -> None:
    reused, chunks = 1000, 6
    name, options = MemoryArm(policy, share).request(reused, chunks)
    get_policy(name, options)
    spent = {
        "epic": lambda o: o["k"] * chunks,
        "attended": lambda o: o["k"] + o["window"] * chunks,
    }.get(policy, lambda o: o["share"] * reused)(options)
    assert share * reused - 1e-6 <= spent <= share * reused + chunks
    assert MemoryArm(f"{policy}:{'check=2' if policy in ('cacheblend', 'mean_shift') else 'k=7'}").request(1, 1)[1]


def test_full_recompute_names_no_source_policy() -> None:
    assert MemoryArm(FULL).request(1000, 6) == ("prefix_cache", {})


@pytest.mark.parametrize("retrieval", ["words", "evidence"])
def test_units_stand_in_a_random_order_that_stays(retrieval: str, tmp_path: Path) -> None:
    data = load_memories()
    settings = MemoryRun("m", tmp_path / "m.json", tuple(ARMS), units=5, retrieval=retrieval)
    questions = choose(data, 6, 0)
    asked = select_units(data, questions, settings)
    assert asked == select_units(data, questions, settings)
    assert [len(each.units) for each in asked] == [5] * 6
    if retrieval == "evidence":
        assert [each.recall for each in asked] == [1.0] * 6
    (system, user) = asked[0].messages("Be brief.")
    assert system["content"] == "Be brief."
    places = [user["content"].index(unit.text) for unit in asked[0].units]
    assert places == sorted(places) and user["content"].endswith("Answer in one line.")
    with pytest.raises(ConfigError, match="retrieval 'magic' is unknown"):
        select_units(data, questions, MemoryRun("m", tmp_path / "m.json", tuple(ARMS), retrieval="magic"))


def test_a_cell_compares_an_arm_with_full_recompute_question_by_question() -> None:
    rows = [row(0), row(1, "multi-hop"), row(2, **{"mean_shift r=0.1": 0.9})]
    cells, by_category = cells_of(rows, "m", ARMS)
    full, low, high, reuse = cells
    assert full["policy"] == FULL and full["f1_diff"] == 0 and full["f1_diff_ci"] == [0, 0] and full["speedup"] == 1
    assert (low["r"], low["n"], low["f1"]) == (0.1, 3, pytest.approx(0.7))
    assert low["f1_diff"] == pytest.approx(-0.1) and low["f1_diff_ci"][0] <= -0.1 <= low["f1_diff_ci"][1]
    assert (low["speedup"], low["reused_share"], low["edit"], high["f1_diff"]) == (2, 0.8, "chunks", 0)
    assert reuse["r"] == 0 and reuse["faults"] == 0 and reuse["stored"] == {"exact": 0.75, "k8v4": 0.25}
    assert {c["category"]: c["n"] for c in by_category} == {"temporal": 2, "multi-hop": 1}
    (found,) = retrieval_of(rows)
    assert (found["known"], found["recall"]) == (2, 0.5)


def test_each_arm_is_paired_with_cacheblend_at_its_share() -> None:
    arms = [MemoryArm(FULL), *(MemoryArm(p, r) for p in ("cacheblend", "mean_shift") for r in (0.1, 0.3))]
    names = [arm.name for arm in arms]
    rows = []
    for number in range(4):
        each = row(number)
        one = each["arms"][FULL]
        each["arms"] = {name: one | {"f1": 0.2 * at, "recompute_ratio": 0.1 * at} for at, name in enumerate(names)}
        rows.append(each)
    found = pairs_of(rows, "m", [*arms, MemoryArm("epic", 0.5)][: len(arms)])
    assert [(pair["a"], pair["b"], pair["r"]) for pair in found] == [
        ("mean_shift", "cacheblend", 0.1),
        ("mean_shift", "cacheblend", 0.3),
    ]
    assert all(pair["difference"] == pytest.approx(0.4) and pair["n"] == 4 for pair in found)
    assert (found[0]["recompute_ratio_a"], found[0]["recompute_ratio_b"]) == (pytest.approx(0.3), pytest.approx(0.1))
    assert not pairs_of(rows, "m", arms[3:])


def test_a_fault_is_counted() -> None:
    bad = row(0)
    bad["arms"]["direct_reuse"]["reason"] = "could not choose"
    assert cells_of([bad, row(1)], "m", ARMS)[0][-1]["faults"] == 1


def test_the_explained_share_is_of_the_squared_residual() -> None:
    first, second = shift_of([shifted(3.0), shifted(1.0)], "m")
    assert first["key_explained"] is None and first["key_error"] == 0
    assert second["n"] == 2 and second["kept_tokens"] == 180
    assert second["value_explained"] == 0.5 and second["value_common"] == 0.75
    assert second["value_probes"] == -0.5, "probes that are not like the others add error"
    assert second["value_explained_norm"] == pytest.approx(1 - 0.5**0.5, abs=1e-6) and second["value_error"] == 0.2


def test_the_report_has_a_row_an_arm_and_draws_both_plots(tmp_path: Path) -> None:
    cells, by_category = cells_of([row(0), row(1)], "m", ARMS)
    shift = shift_of([shifted(3.0)], "m")
    result = {
        "cells": cells,
        "by_category": by_category,
        "pairs": pairs_of([row(0), row(1)], "m", ARMS),
        "retrieval": retrieval_of([row(0)]),
        "shift": shift,
        "datasets": [{"dataset": "locomo", "evidence": "turns"}],
    }
    answers, retrieval, category, layers = sections(result)
    assert len(answers.rows) == len(ARMS) and len(layers.rows) == 2
    for section in (answers, retrieval, category, layers):
        assert all(isinstance(column.text(cell), str) for cell in section.rows for column in section.columns)
    for path in [*plot_memory(cells, tmp_path / "m.json"), *plot_shift(shift, tmp_path / "m.json")]:
        assert path.stat().st_size > 4000
    assert plot_shift([], tmp_path / "m.json") == []


@pytest.mark.engine
def test_quick_shows_what_must_hold_and_measures_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "memory.json"
    command = ["eval", "memory", "--quick", "--plots", "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    full, shift, reuse = found["cells"]
    assert [cell["policy"] for cell in found["cells"]] == [FULL, "mean_shift", "direct_reuse"]
    assert (full["f1_diff"], full["recompute_ratio"], full["kl"], full["reused_share"]) == (0, 1, 0, 0)
    shape = {"model", "dataset", "policy", "r", "precision", "n", "f1", "f1_ci", "em", "rouge1", "bleu1", "ttft_ms"}
    for cell in found["cells"]:
        assert shape | {"recompute_ratio", "speedup", "f1_diff", "f1_diff_ci", "kl"} <= cell.keys()
        assert (cell["n"], cell["faults"]) == (2, 0)
    for cell in (shift, reuse):
        assert 0.4 < cell["reused_share"] <= 1, "chunks stand in the prompt and are really reused"
        assert cell["kl"] > 0
    assert reuse["recompute_ratio"] < 0.05 < shift["recompute_ratio"] < 0.3
    (retrieval,) = found["retrieval"]
    assert (retrieval["questions"], retrieval["units"]) == (2, 2) and 0 < retrieval["recall"] <= 1
    layers = found["shift"]
    assert layers[0]["value_error"] < 1e-3 < layers[-1]["value_error"], "values of layer 0 know no context"
    assert all(cell["value_explained"] is not None for cell in layers[2:])
    text = (tmp_path / "memory.md").read_text()
    assert "mean_shift" in text and (tmp_path / "memory-f1.png").exists() and (tmp_path / "memory-shift.svg").exists()

    monkeypatch.setattr(memory_module, "open_cache", lambda *_: pytest.fail("everything was measured"))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["cells"] == found["cells"]
