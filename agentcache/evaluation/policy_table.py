"""One line a policy, of the results of `paired-edit` and `qa`: what it recomputes, how long it takes, what it recovers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agentcache.errors import ConfigError
from agentcache.evaluation.paired_arms import TRANSPLANT
from agentcache.evaluation.qa_cells import AGAIN, ALL
from agentcache.evaluation.report import Column, markdown_table
from agentcache.recovery import get_policy
from agentcache.recovery.spec import parse_policy

__all__ = ["policy_lines", "policy_table"]

Cell = Mapping[str, Any]
Line = dict[str, Any]

_FORM: Final = "table"  # the derived condition as the paper has it
_NEEDED: Final[dict[str, dict[str, Any]]] = {  # options without which a policy is none
    "patchkv": {"window": 0},
    "carrier_window": {"start": 0, "stop": 1},
}


def policy_lines(results: Iterable[Mapping[str, Any]]) -> tuple[list[Line], list[int]]:
    """Returns a line for each policy and budget, and the distances that there are, ascending.

    A line has `policy`, `k`, `exact`, `source`, `mr` by distance, and, where a result has them, `recompute_ratio` and
    `ttft_ratio` (its time to the first token over prefix caching's) at the shortest distance. `qa` measures a policy as it is asked
    for, its defaults otherwise, and not at K: a line without K has `f1_diff`, `f1_diff_ci`, `f1_recompute_ratio` and `f1_ttft_ratio`.

    Args:
        results: What the JSON files of `paired-edit` and `qa` hold, in any order.

    Raises:
        ConfigError: There is nothing of either, two results differ in their model, or one measures a cell that another has too.
    """
    cells = [cell for result in results for cell in result.get("cells", ())]
    paired = [cell for cell in cells if (cell.get("condition"), cell.get("form")) == ("derived", _FORM)]
    asked = [cell for cell in cells if (cell.get("dataset"), cell.get("edit")) == (ALL, ALL)]
    for kind, found in (("paired-edit", paired), ("qa", asked)):
        if len(models := sorted({cell["model"] for cell in found})) > 1:
            raise ConfigError(f"these results of {kind} are of {' and '.join(models)}; give those of one model")
    lines: dict[tuple[str, int | None], Line] = {}
    for cell in paired:
        if cell["policy"].startswith(TRANSPLANT):
            continue
        line = _line(lines, cell["policy"], cell["k"])
        if cell["distance"] in line["mr"]:
            where = f"distance {cell['distance']} (in contexts from {cell['tokens']} tokens)"
            raise ConfigError(f"two results measure {cell['policy']} at {where}; give one")
        line["mr"][cell["distance"]] = cell["mr"]
        if cell["distance"] == min(line["mr"]):
            line |= {"recompute_ratio": cell["recompute_ratio"], "ttft_ratio": _inverse(cell["speedup"])}
    for cell in asked:
        if cell["policy"] != AGAIN:
            line = _line(lines, cell["policy"], None)
            if "f1_diff" in line:
                raise ConfigError(f"two results ask {cell['policy']} questions; give one")
            line.update(
                f1_diff=cell["f1_diff"],
                f1_diff_ci=cell["f1_diff_ci"],
                f1_recompute_ratio=cell["recompute_ratio"],
                f1_ttft_ratio=_inverse(cell["speedup"]),
            )
    if not lines:
        raise ConfigError(
            "these results have no derived items and no questions; give files of `eval paired-edit` or `eval qa`"
        )
    return sorted(lines.values(), key=_rank), sorted({d for line in lines.values() for d in line["mr"]})


def policy_table(results: Iterable[Mapping[str, Any]]) -> str:
    """Returns the lines of `policy_lines` as a Markdown table; a dash where nothing was measured.

    Raises:
        ConfigError: See there.
    """
    lines, distances = policy_lines(results)
    columns = [
        Column("policy", _name, left=True),
        Column("exact", lambda line: line["exact"], left=True),
        Column("source", lambda line: line["source"], left=True),
        Column("recomputed", lambda line: _percent(line.get("recompute_ratio"))),
        Column("TTFT", lambda line: _percent(line.get("ttft_ratio"))),
        *(Column(f"MR, d = {d:,}", lambda line, d=d: _two(line["mr"].get(d))) for d in distances),  # type: ignore[misc]
    ]
    if any("f1_diff" in line for line in lines):
        columns += [
            Column("F1 difference", _difference),
            Column("its recomputed", lambda line: _percent(line.get("f1_recompute_ratio"))),
            Column("its TTFT", lambda line: _percent(line.get("f1_ttft_ratio"))),
        ]
    return markdown_table(lines, columns)


def _line(lines: dict[tuple[str, int | None], Line], policy: str, k: int | None) -> Line:
    """Returns the line of a policy and a budget, which begins here."""
    if (policy, k) not in lines:
        spec, _, _ = policy.partition("@")  # `qa` writes a checkpoint's precision behind it
        name, options = parse_policy(spec)
        made = get_policy(name, _NEEDED.get(name, {}) | options)
        exact = "where it saves little" if name == "auto" else "yes" if made.exact else "no"
        lines[policy, k] = {"policy": policy, "k": k, "exact": exact, "source": _short(made.source), "mr": {}}
    return lines[policy, k]


def _short(source: str) -> str:
    """Returns the name in a policy's source: a paper's without its subtitle, `ours`."""
    name = re.split(r": |, (?:as|from|after) ", source)[0]
    arm = re.fullmatch(r"(?:the )?(.+ arm) of .*", name)
    return f"the papers' {arm[1]}" if arm else "ours" if name == "agentcache" else name


def _rank(line: Line) -> tuple[bool, str, int]:
    return line["exact"] != "yes", line["policy"], line["k"] or 0


def _name(line: Cell) -> str:
    return f"`{line['policy']}`" + ("" if line["k"] is None else f" K={line['k']}")


def _inverse(speedup: float | None) -> float | None:
    return None if speedup is None else 1 / speedup


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:z.2f}"


def _difference(line: Cell) -> str:
    value: float | None = line.get("f1_diff")
    bounds: Sequence[float] | None = line.get("f1_diff_ci")
    if value is None or bounds is None:
        return "–"
    return f"{100 * value:+z.1f} [{100 * bounds[0]:+z.1f}, {100 * bounds[1]:+z.1f}]"
