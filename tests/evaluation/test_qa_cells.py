"""From rows to cells, tables and the plot, without an engine."""

from __future__ import annotations

import pytest

from agentcache.evaluation.qa_cells import AGAIN, ALL, BASE, cells, pareto_plot, per_item, sections


def arm(f1: float, ttft: float, *, used: str | None = BASE, ratio: float = 1.0, answer: str = "x"):
    found = {"answer": answer, "f1": f1, "em": float(f1 == 1), "rouge1": f1, "bleu1": f1, "ttft_ms": ttft}
    if used is not None:
        found |= {"recompute_ratio": ratio, "planned_ratio": ratio, "stored": {"exact": 30, "k8v4": 10}, "used": used}
    return found


def row(name: str, dataset: str, edit: str, carrier: str, exact: float, other: float):
    arms = {
        "auto": arm(other, 25.0, used="edit_local" if other else BASE, ratio=0.5, answer="y"),
        AGAIN: arm(exact, 120.0, used=None),
        BASE: arm(exact, 100.0),
    }
    return {"id": name, "dataset": dataset, "edit": edit, "carrier": carrier, "arms": arms}


ROWS = [
    row("a", "hotpotqa", "replace", "behind", 1.0, 0.5),
    row("b", "hotpotqa", "update", "inside", 0.5, 0.5),
    row("c", "2wiki", "replace", "behind", 0.5, 1.0),
    row("d", "2wiki", "update", "before", 0.0, 0.0),
]


@pytest.fixture
def result():
    return cells(ROWS, "tiny") | {
        "provenance": {
            "model": {"name": "tiny", "hash": "0" * 8, "dtype": "float32"},
            "hardware": {"cpu": "", "cores": 2},
            "data": [],
            "seeds": {},
            "versions": {},
            "command": "agentcache eval qa",
            "date": "2026-01-01",
        }
    }


def cell(found, policy, dataset=ALL, edit=ALL):
    [one] = [c for c in found["cells"] if (c["policy"], c["dataset"], c["edit"]) == (policy, dataset, edit)]
    return one


def test_cells_are_there_for_each_group_and_pooled(result):
    groups = {(c["dataset"], c["edit"]) for c in result["cells"]}
    assert groups == {(d, e) for d in (ALL, "hotpotqa", "2wiki") for e in (ALL, "replace", "update")}
    assert [c["policy"] for c in result["cells"][:3]] == [BASE, "auto", AGAIN]
    assert {c["carrier"]: c["n"] for c in result["by_carrier"]} == {"behind": 2, "inside": 1, "before": 1}


def test_a_resume_that_its_policy_could_not_do_is_a_fault_and_one_that_auto_left_exact_is_none():
    rows = [dict(row, arms=dict(row["arms"])) for row in ROWS]
    for each in rows:
        each["arms"]["auto"] = each["arms"]["auto"] | {"reason": "it saves too little", "used": "auto"}
        each["arms"]["epic"] = arm(0.5, 30.0, used="epic")
    rows[0]["arms"]["epic"]["reason"] = "could not choose"
    found = cells(rows, "tiny")
    assert [cell(found, policy)["faults"] for policy in (BASE, "auto", "epic", AGAIN)] == [0, 0, 1, 0]


def test_the_figures_of_a_cell(result):
    pooled = cell(result, "auto")
    assert (pooled["model"], pooled["n"]) == ("tiny", 4)
    assert pooled["f1"] == pytest.approx(0.5)
    assert pooled["f1_diff"] == pytest.approx(0.0)  # −0.5, 0, 0.5, 0
    low, high = pooled["f1_diff_ci"]
    assert -0.5 <= low < 0 < high <= 0.5
    assert pooled["em"] == 0.25
    assert pooled["speedup"] == pytest.approx(4.0)
    assert pooled["recompute_ratio"] == 0.5
    assert pooled["ran_exact"] == 0.25
    assert pooled["stored"] == {"exact": 0.75, "k8v4": 0.25}
    assert pooled["same_answer"] == 0
    assert cell(result, "auto", "hotpotqa")["f1_diff"] == pytest.approx(-0.25)
    assert cell(result, "auto", "2wiki", "replace")["f1_diff_ci"] == [0.5, 0.5]


def test_the_exact_arm_does_not_differ_from_itself(result):
    for found in (c for c in result["cells"] if c["policy"] == BASE):
        assert (found["f1_diff"], found["f1_diff_ci"], found["speedup"], found["same_answer"]) == (0, [0, 0], 1, 1)


def test_an_arm_without_a_report_has_no_ratio(result):
    again = cell(result, AGAIN)
    assert (again["recompute_ratio"], again["stored"], again["ran_exact"]) == (None, {}, None)


def test_what_intervals_are_made_of_is_told():
    found = per_item(ROWS)
    assert found["id"] == ["a", "b", "c", "d"]
    assert found["f1"]["auto"] == [0.5, 0.5, 1.0, 0.0]


def test_tables(result):
    pooled, carrier, dataset, edit = sections(result)
    assert [column.title for column in carrier.columns] == ["policy", "behind (2)", "inside (1)", "before (1)"]
    assert [column.title for column in dataset.columns] == ["policy", "2wiki (2)", "hotpotqa (2)"]
    [auto] = [r for r in dataset.rows if r["policy"] == "auto"]
    assert dataset.columns[2].text(auto).startswith("-25.0 [-50.0, 0.0")
    assert pooled.columns[1].text(cell(result, "auto")).startswith("50.0 [")
    ways = [column.text for column in pooled.columns if column.title == "restored from"]
    assert ways[0](cell(result, "auto")) == "exact 75%, k8v4 25%"
    assert ways[0](cell(result, AGAIN)) == "–"
    assert [row["policy"] for row in edit.rows] == [BASE, "auto", AGAIN]


def test_the_plot_is_drawn(tmp_path, result):
    pytest.importorskip("matplotlib")
    written = pareto_plot(tmp_path / "qa.json", result)
    assert [path.name for path in written] == ["qa-pareto.svg", "qa-pareto.png"]
    svg = written[0].read_text(encoding="utf-8")
    assert "auto" in svg and AGAIN not in svg
