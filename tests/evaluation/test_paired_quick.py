"""`agentcache eval paired-edit --quick`: from the command line to the result, on a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.cli import app

POLICIES = "edit_local,attended,direct_reuse"


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["eval", "paired-edit", *words])


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """The result of a quick run."""
    out = tmp_path_factory.mktemp("paired") / "paired.json"
    result = call("--quick", "--policies", POLICIES, "--transplant", "edit_local", "--out", str(out))
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.engine
def test_the_result_has_a_cell_for_each_policy_and_budget_with_what_the_tables_need(quick: Path) -> None:
    result = json.loads(quick.read_text())
    assert {"provenance", "cells", "pairs", "budgets", "primary_k"} <= result.keys()
    labels = {(cell["policy"], cell["k"]) for cell in result["cells"]}
    budgets = {(policy, 16) for policy in ("edit_local", "attended", "transplanted/edit_local")}
    assert labels == budgets | {("direct_reuse", None), ("prefix_cache", None)}
    for cell in result["cells"]:
        assert {
            "model", "condition", "distance", "form", "k", "policy", "n_drawn", "n_kept", "mr", "mr_ci", "flip", "flip_ci",
            "kl_recovery", "recompute_ratio", "ttft_ms", "speedup", "wins", "ties", "losses", "p_holm",
        } <= cell.keys()  # fmt: skip
        assert 1 <= cell["n_kept"] <= 2 and cell["n_kept"] <= cell["n_drawn"]
        assert cell["mr_ci"][0] <= cell["mr"] <= cell["mr_ci"][1]
    assert result["provenance"]["model"]["name"] == "smollm2"


@pytest.mark.engine
def test_exact_and_direct_repairs_are_what_they_must_be(quick: Path) -> None:
    cells = {(cell["policy"], cell["k"]): cell for cell in json.loads(quick.read_text())["cells"]}
    exact, alone = cells["prefix_cache", None], cells["direct_reuse", None]
    assert exact["mr"] == pytest.approx(1, abs=0.05) and exact["flip"] == 1 and exact["speedup"] == 1
    assert exact["recompute_ratio"] == 1 and alone["repair_tokens"] == 0 == alone["recompute_ratio"]
    assert cells["edit_local", 16]["repair_tokens"] == 16 == cells["transplanted/edit_local", 16]["repair_tokens"]
    # The answer stands in the edit, which every policy computes: what is behind it matters little.
    assert all(cell["mr"] > 0.5 for cell in cells.values())


@pytest.mark.engine
def test_the_same_command_again_starts_no_engine_and_gives_the_same_result(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads(quick.read_text())
    monkeypatch.setattr("agentcache.evaluation.paired_edit._engine", lambda *_: pytest.fail("all is measured"))
    result = call("--quick", "--policies", POLICIES, "--transplant", "edit_local", "--out", str(quick), "--plots")
    assert result.exit_code == 0, result.output
    assert json.loads(quick.read_text())["cells"] == before["cells"]
    assert {path.suffix for path in quick.parent.iterdir()} == {".json", ".jsonl", ".md", ".png", ".svg"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "edit_lokal"], "unknown policy 'edit_lokal'"),
        (["--k", "many"], "no list of whole numbers"),
        (["--conditions", "indirect"], "--conditions 'indirect' is not known"),
        (["--out", "result.txt"], "no .json file"),
    ],
)
def test_what_is_not_allowed_is_refused_before_a_model_is_looked_for(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentcache.evaluation.paired_edit.fingerprint", lambda _: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert result.exit_code != 0
    assert message in " ".join((result.output + str(result.exception)).replace("│", " ").split())
