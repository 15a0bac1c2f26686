"""From measurements to cells and tests: families, pairing, and what is left out."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from agentcache.evaluation.paired_arms import PAPER
from agentcache.evaluation.paired_report import cells_from
from agentcache.evaluation.statistics import holm, wilcoxon

CELL = {"condition": "derived", "form": "table", "distance": 0, "tokens": 600}
DRAWS = range(8)


def reference(draw: int, *, kept: bool = True, cell: dict[str, Any] = CELL) -> dict[str, Any]:
    row = {"stale_margin": -4.0, "oracle_margin": 4.0, "stale_kl": 2.0, "tokens": 640, "kept": kept}
    return {"cell": cell, "draw": draw, "arm": None, "row": row}


def arm(
    draw: int, policy: str, recovered: float, k: int | None = 32, ttft_ms: float = 10.0, cell: dict[str, Any] = CELL
) -> dict[str, Any]:
    row = {
        "margin": -4.0 + 8.0 * recovered,
        "kl": 2.0 * (1 - recovered),
        "flip": recovered > 0.5,
        "repair_tokens": 32,
        "recompute_ratio": 0.1,
        "ttft_ms": ttft_ms,
        "select_ms": 0.0,
    }
    return {"cell": cell, "draw": draw, "arm": {"policy": policy, "k": k}, "row": row}


def measured(cell: dict[str, Any] = CELL) -> list[dict[str, Any]]:
    rows = [reference(draw, cell=cell) for draw in DRAWS]
    for at, policy in enumerate(PAPER):
        budget = None if policy == "edit_local_boundary" else 32
        rows += [arm(draw, policy, 1 - at / 10 - draw / 100, budget, cell=cell) for draw in DRAWS]
    rows += [arm(draw, "prefix_cache", 1.0, None, 30.0 + draw, cell=cell) for draw in DRAWS]
    return rows


def found(rows: list[dict[str, Any]]) -> dict[tuple[str, int | None], dict[str, Any]]:
    return {(cell["policy"], cell["k"]): cell for cell in cells_from(rows, "m")["cells"]}


def test_the_fifteen_pairs_of_the_papers_policies_are_one_family() -> None:
    rows = [*measured(), *(arm(draw, "attended", 0.9 + draw / 50, 64) for draw in DRAWS)]
    pairs = cells_from(rows, "m")["pairs"]
    paper = [pair for pair in pairs if pair["family"] == "paper"]
    assert [(pair["a"], pair["b"]) for pair in paper] == [*combinations(PAPER, 2)]
    assert [pair["p_holm"] for pair in paper] == holm([pair["p"] for pair in paper])
    (other,) = [pair for pair in pairs if pair["family"] == "others"]
    assert (other["a"], other["k_a"], other["b"], other["k_b"], other["p_holm"]) == (
        "attended",
        64,
        "edit_local",
        32,
        other["p"],
    )


def test_the_p_of_a_cell_is_that_of_its_pair_with_the_reference() -> None:
    cells = found(measured())
    one = [1 - draw / 100 for draw in DRAWS]
    assert cells["edit_local", 32]["p_holm"] is None and cells["prefix_cache", None]["p_holm"] is None
    p = wilcoxon(one, [value - 0.5 for value in one])
    assert p == pytest.approx(2 / 2 ** len(DRAWS))
    assert cells["random", 32]["p_holm"] == pytest.approx(min(1.0, 15 * p))
    assert cells["random", 32]["losses"] == len(DRAWS)


def test_cells_are_compared_apart() -> None:
    far = CELL | {"distance": 250}
    rows = [*measured(), *measured(far)]
    alone, both = cells_from(measured(), "m"), cells_from(rows, "m")
    assert both["cells"][: len(alone["cells"])] == alone["cells"] and len(both["pairs"]) == 2 * len(alone["pairs"])
    assert [cell["distance"] for cell in both["cells"]] == [0] * len(alone["cells"]) + [250] * len(alone["cells"])


def test_an_item_that_is_not_kept_counts_as_drawn_alone() -> None:
    rows = [*measured(), reference(99, kept=False), arm(99, "random", -50.0)]
    cell = found(rows)["random", 32]
    assert (cell["n_drawn"], cell["n_kept"]) == (9, 8) and cell["mr"] == pytest.approx(0.465)


def test_arms_are_paired_on_the_items_that_both_repaired() -> None:
    rows = [row for row in measured() if row["arm"] is None or row["arm"]["policy"] != "random" or row["draw"] < 3]
    result = cells_from(rows, "m")
    (pair,) = [pair for pair in result["pairs"] if (pair["a"], pair["b"]) == ("edit_local", "random")]
    assert pair["n"] == 3 and pair["difference"] == pytest.approx(0.5)
    assert found(rows)["random", 32]["n_kept"] == 3


def test_the_speedup_is_the_median_of_the_items_own() -> None:
    assert found(measured())["random", 32]["speedup"] == pytest.approx(3.35)


def test_a_budget_is_compared_with_the_reference_of_its_own() -> None:
    rows = [*measured(), *(arm(draw, "edit_local", 0.2, 8) for draw in DRAWS)]
    rows += [arm(draw, "random", 0.3, 8) for draw in DRAWS]
    cells = found(rows)
    assert cells["random", 8]["wins"] == len(DRAWS) and cells["random", 8]["p_holm"] is None
    assert cells["random", 32]["losses"] == len(DRAWS)


def test_other_budgets_diagnostics_and_transplants_are_shown_and_not_tested() -> None:
    shown = [
        ("epic", 32),
        ("epic", 8),
        ("attended", 64),
        ("attended", 128),
        ("causal_oracle", 32),
        ("transplanted/epic", 32),
    ]
    rows = [*measured(), *(arm(draw, name, 0.9 + draw / 50, k) for name, k in shown for draw in DRAWS)]
    tested = {(pair["a"], pair["k_a"]) for pair in cells_from(rows, "m")["pairs"] if pair["family"] == "others"}
    assert tested == {("epic", 32), ("attended", 64)} and found(rows).keys() >= {*shown}


def test_transplanted_rows_are_compared_with_the_same_rows_recomputed() -> None:
    rows = [
        *measured(),
        *(arm(draw, "transplanted/edit_local", 0.9 - draw / 100, k) for k in (16, 32) for draw in DRAWS),
    ]
    rows += [arm(draw, "edit_local", 0.7 - draw / 100, 16) for draw in DRAWS]
    pairs = [pair for pair in cells_from(rows, "m")["pairs"] if pair["family"] == "transplants"]
    shown = [(p["a"], p["k_a"], p["b"], p["k_b"], p["n"], p["difference"]) for p in pairs]
    name = "transplanted/edit_local"
    assert shown == [(name, 16, "edit_local", 16, 8, 0.2), (name, 32, "edit_local", 32, 8, -0.1)]
    assert [pair["p_holm"] for pair in pairs] == [pytest.approx(2 * pair["p"]) for pair in pairs]
    assert found(rows)[name, 32]["p_holm"] is None  # that column is of the policies' own tests


def test_a_harder_form_is_a_condition_of_its_own() -> None:
    rows = [*measured(CELL | {"form": "chain"}), *measured()]
    assert [cell["condition"] for cell in cells_from(rows, "m")["cells"]] == ["derived"] * 7 + ["hard:chain"] * 7


def test_each_items_recovery_is_there() -> None:
    rows = [row for row in measured() if row["arm"] is None or row["arm"]["policy"] != "random" or row["draw"] < 3]
    (items,) = cells_from(rows, "m")["per_item"]
    assert items["draws"] == [*DRAWS] and items["condition"] == "derived"
    assert items["mr"]["edit_local@32"] == [round(1 - draw / 100, 4) for draw in DRAWS]
    assert items["mr"]["random@32"] == [0.5, 0.49, 0.48, None, None, None, None, None]
    assert items["mr"].keys() == items["recompute_ratio"].keys() and "edit_local_boundary" in items["mr"]
    assert items["recompute_ratio"]["random@32"] == [0.1] * 3 + [None] * 5


def test_nothing_measured_gives_no_cells() -> None:
    assert cells_from([], "m")["cells"] == [] and cells_from([reference(0, kept=False)], "m")["cells"] == []
