"""docs/evaluation.md says what the committed results hold: its figures are made from them here and looked for there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TEXT = " ".join((ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8").split())

Cell = Mapping[str, Any]


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))
    assert f"`{name}`" in TEXT
    return found


def derived(distance: int) -> dict[tuple[str, int | None], Cell]:
    cells = result(f"paired-edit-qwen1.5b{'-far' if distance > 250 else ''}.json")["cells"]
    return {(c["policy"], c["k"]): c for c in cells if (c["form"], c["distance"]) == ("table", distance)}


def share(cell: Cell) -> str:
    """Returns a cell's time as a share of prefix caching's."""
    return f"{100 / cell['speedup']:.0f} %"


def flips(cell: Cell) -> int:
    return round(cell["flip"] * cell["n_kept"])


def recovered(cell: Cell) -> str:
    low, high = cell["mr_ci"]
    return f"{cell['mr']:.2f} [{low:.2f}, {high:.2f}]"


def kept(cell: Cell) -> str:
    return f"{cell['n_kept']} kept of {cell['n_drawn']}, {cell['prompt_tokens']:,} tokens"


def test_direct_edits() -> None:
    cells = result("paired-edit-qwen0.5b.json")["cells"]
    one = cells[1]
    assert f"{one['n_kept']} items kept of {one['n_drawn']}, {one['prompt_tokens']:,} tokens, K = 32" in TEXT
    assert f"every arm has MR {least(cells, 'mr')} or more" in TEXT


def test_derived_edits_beside_their_answer() -> None:
    cells = derived(0)
    local, shift, blend = cells["edit_local", 32], cells["mean_shift", 32], cells["cacheblend", 32]
    edge = cells["edit_local_boundary", None]
    assert (
        f"Derived, d = 0, Qwen2.5-Coder-1.5B, {kept(local)}, K = 32, {local['recompute_ratio']:.1%}".replace("%", " %")
        in TEXT
    )
    assert f"`edit_local` has MR {local['mr']:.2f} and flips {flips(local)} of {local['n_kept']}" in TEXT
    for policy in ("epic", "patchkv", "frontier", "attended", "auto"):
        assert round(cells[policy, 32]["mr"], 2) == 1 and flips(cells[policy, 32]) == local["n_kept"]
    assert all(
        round(cells[arm]["mr"], 2) == 0.01 for arm in (("direct_reuse", None), ("random", 32), ("structural", 32))
    )
    assert f"does it with {edge['repair_tokens']:.0f} tokens, at {share(edge)} of prefix caching's time" in TEXT
    assert f"Its MR of {edge['mr']:.2f} overshoots" in TEXT
    assert (
        f"`cacheblend` {blend['mr']:.2f} with {flips(blend)} flips of {blend['n_kept']} (p = {blend['p_holm']:.3f}"
        in TEXT
    )
    assert (
        f"`mean_shift` recovers {shift['mr']:.2f} and flips {flips(shift)} of {shift['n_kept']} at {shift['repair_tokens']:.0f} "
        "recomputed tokens"
    ) in TEXT


def test_derived_edits_away_from_their_answer() -> None:
    cells = derived(250)
    wide, narrow, query = cells["attended", 64], cells["attended", 32], cells["prophetkv", 32]
    low, high = wide["mr_ci"]
    assert f"Derived, d = 250, same model and K, {kept(wide)}" in TEXT
    assert (
        f"`attended` with K = 64 has MR {wide['mr']:.2f} [{low:.2f}, {high:.2f}] and flips {flips(wide)} of {wide['n_kept']} at "
        f"{share(wide)} of prefix caching's time"
    ) in TEXT
    assert f"with K = 32 {narrow['mr']:.2f} and {flips(narrow)} of {narrow['n_kept']} at {share(narrow)}" in TEXT
    windows = (("edit_local", 32), ("edit_local_boundary", None), ("patchkv", 32), ("frontier", 32))
    assert {round(cells[arm]["mr"], 2) for arm in windows} == {0.01}
    near, far = derived(0)["cacheblend", 32]["mr"], cells["cacheblend", 32]["mr"]
    assert f"`cacheblend` falls from {near:.2f} to {far:.2f}".replace("-", "−") in TEXT
    assert f"importance by the query alone, recovers {query['mr']:.2f} at {share(query)} of the time" in TEXT


def test_derived_edits_far_from_their_answer() -> None:
    cells = derived(1500)
    wide, query, none = cells["attended", 64], cells["prophetkv", 32], cells["direct_reuse", None]
    assert f"Derived, d = 1,500, same model in bfloat16 on a machine with AVX-512, {kept(wide)}" in TEXT
    assert f"times of {cells['prefix_cache', None]['n_kept']} items" in TEXT
    assert (
        f"`attended` with K = 64 has MR {recovered(wide)} and flips {flips(wide)} of {wide['n_kept']} at {share(wide)} of prefix "
        f"caching's time, its scoring inside: {wide['repair_tokens']:.0f} tokens, {100 * wide['recompute_ratio']:.1f} % of the text"
    ) in TEXT
    assert (
        f"`prophetkv` with K = 32 has {recovered(query)} and flips {flips(query)} of {query['n_kept']} at {share(query)}."
        in TEXT
    )
    windows = cells["edit_local", 32], cells["patchkv", 32]
    assert {abs(round(cell["mr"], 2)) for cell in windows} == {0}
    assert {flips(cell) for cell in (*windows, none)} == {2}
    assert f"The model answers {100 * wide['n_kept'] / wide['n_drawn']:.0f} % of the items" in TEXT


def test_harder_forms() -> None:
    cells = {(c["condition"], c["policy"], c["k"]): c for c in result("paired-edit-qwen1.5b-hard.json")["cells"]}
    arms = (("attended", 64), ("prophetkv", 32), ("cacheblend", 32), ("edit_local", 32), ("direct_reuse", None))
    said = {
        "hard:two_edits": "two edits at once",
        "hard:length": "an edit that changes length",
        "hard:competing": "three competing tables",
        "hard:paraphrase": "a table without the edit's words",
    }
    assert {form for form, *_ in cells} == said.keys()
    for form, name in said.items():
        row = [cells[form, *arm] for arm in arms]
        assert row[0]["n_kept"] >= 20
        values = " | ".join(f"{cell['mr']:z.2f}, {flips(cell)}" for cell in row)
        assert f"| {name} | {row[0]['n_kept']} of {row[0]['n_drawn']} | {values} |" in TEXT
    wide, query = (cells["hard:competing", *arm] for arm in arms[:2])
    assert min(cells[form, "attended", 64]["mr"] for form in said) == wide["mr"]
    exact = [cells[form, "prefix_cache", None] for form in said]
    low, high = (bound(cell["mr"] for cell in exact) for bound in (min, max))
    assert f"The exact policy itself has {low:.2f} to {high:.2f} in these forms (4 or 5 items each)" in TEXT
    assert {cell["n_kept"] for cell in exact} == {4, 5}
    assert {flips(cells[form, "attended", 64]) for form in said} == {20}
    assert f"its least MR {recovered(wide)}" in TEXT and f"falls to {recovered(query)}" in TEXT


def test_drift() -> None:
    found = result("drift.json")
    models = [model["name"] for model in found["models"]]
    assert models == ["smollm2", "qwen05b", "qwen15b"] and found["pairs"] == 42
    assert {use["name"] for model in found["models"] for use in model["data"]} == {"2wiki", "musique"}
    cells = [cell for cell in found["cells"] if cell["n"] >= 10]
    first = {cell["model"]: cell for cell in cells if cell["distance"] == 0}
    far = [cell for cell in cells if cell["distance"] >= 256]
    a, b, c = (f"{first[model]['value']:.3f}" for model in models)
    assert (
        f"42 real edits of 2Wiki and MuSiQue texts on each of three models, up to {found['max_tokens']} tokens" in TEXT
    )
    assert f"Stale values rise from {a}, {b} and {c}" in TEXT
    assert max(cell["distance"] for cell in cells) == 352 and least(far, "value") == 0.995
    worst = [min(layer["value_first"] for layer in found["layers"] if layer["model"] == model) for model in models]
    assert "The layers that drift most are at {:.3f}, {:.3f} and {:.3f} there".format(*worst) in TEXT
    in_place = sorted(cell["key_in_place"] for cell in cells)
    assert f"at {in_place[0]:.2f} to {in_place[-1]:.2f} at every distance" in TEXT
    near, wide = least([*first.values()], "key"), least(far, "key")
    assert f"with it at {near} and more in the first block and at {wide} and more from 256 tokens on" in TEXT


def test_memories() -> None:
    found = result("memory-smollm2.json")
    sets = ["locomo", "ama_bench_recall"]
    assert [(use["name"], use["count"]) for use in found["provenance"]["data"]] == [(name, 100) for name in sets]
    cells = {(cell["policy"], cell["r"], cell["dataset"]): cell for cell in found["cells"]}
    lengths = [retrieval["prompt_tokens"] for retrieval in found["retrieval"]]
    assert "six memories a question, {:,.0f} and {:,.0f} tokens".format(*lengths) in TEXT
    full = [cells["full_recompute", 1.0, name] for name in sets]
    assert "| full recompute | {:.1f} | {:.1f} |".format(*(100 * cell["f1"] for cell in full)) in TEXT
    for policy, r in (
        ("mean_shift", 0.1),
        ("cacheblend", 0.1),
        ("mean_shift", 0.3),
        ("cacheblend", 0.3),
        ("direct_reuse", 0.0),
    ):
        two = [cells[policy, r, name] for name in sets]
        scores = " | ".join(
            f"{100 * cell['f1']:.1f}: {points(cell['f1_diff'], cell['f1_diff_ci'], sign='')}" for cell in two
        )
        at = f", r = {r}" if r else ""
        assert f"| `{policy}`{at} | {scores} | {share(two[0])}, {share(two[1])} |" in TEXT
    pairs = {(pair["r"], pair["dataset"]): points(pair["difference"], pair["difference_ci"]) for pair in found["pairs"]}
    assert "{} and {} at r = 0.1".format(*(pairs[0.1, name] for name in sets)) in TEXT
    assert "{} and {} at r = 0.3".format(*(pairs[0.3, name] for name in sets)) in TEXT
    ratios = [cells["mean_shift", r, name]["recompute_ratio"] for r in (0.1, 0.3) for name in sets]
    assert {f"{ratio:.0%}" for ratio in ratios} == {"12%", "33%", "36%"}
    shifts = [cell for cell in found["shift"] if cell["layer"] > 0]
    assert {cell["n"] for cell in shifts} == {12}

    def mean(name: str, dataset: str) -> float:
        values = [cell[name] for cell in shifts if (cell["r"], cell["dataset"]) == (0.1, dataset)]
        return 100 * sum(values) / len(values)

    keys, values, best = (
        [mean(name, d) for d in sets] for name in ("key_explained_norm", "value_explained_norm", "value_common")
    )
    assert "{:.1f} and {:.1f} % for keys and {:.1f} and {:.1f} % for values".format(*keys, *values) in TEXT
    most = max(cell[f"{side}_explained_norm"] for cell in shifts for side in ("key", "value"))
    assert f"{100 * most:.1f} % at most in a layer" in TEXT
    assert "would take away {:.0f} and {:.0f} % of the squared error of values".format(*best) in TEXT
    few, many = (cells["cacheblend", r, "ama_bench_recall"] for r in (0.1, 0.3))
    assert f"KL falls from {few['kl']:.3f} to {many['kl']:.3f}" in TEXT
    assert f"and F1 by {100 * (few['f1'] - many['f1']):.1f} points" in TEXT


def points(value: float, bounds: Sequence[float], sign: str = "+") -> str:
    """Returns a difference of F1 and its interval, in points."""
    return f"{100 * value:{sign}.1f} [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]".replace("-", "−")


def test_where_the_frontier_stops() -> None:
    found = result("frontier-smollm2.json")
    cells = {cell["policy"].removesuffix(":length_model=null:most_tokens=4096"): cell for cell in found["cells"][:3]}
    quarter = found["cells"][3]
    assert quarter["policy"] == "frontier" and "length_model" in found["policies"]["frontier"]
    (use,) = found["provenance"]["data"]
    assert f"SmolLM2, {use['count']} real edits of MuSiQue texts, {quarter['suffix']:.0f} tokens behind each" in TEXT
    assert use["name"] == "musique" and found["provenance"]["model"]["name"] == "smollm2"
    assert f"the oracle boundary lies {quarter['boundary']:.0f} tokens behind the edit on average" in TEXT
    assert (
        f"stops at {quarter['stop']:.0f} and not before the boundary in {100 * quarter['covers']:.0f} % of the edits "
        f"({quarter['missed']:.0f} tokens missed on average, {quarter['spent']:.0f} spent)"
    ) in TEXT
    own, tight = cells["frontier"], cells["frontier:threshold=0.99"]
    assert (
        f"from a first step of 32 tokens it stops at {own['stop']:.0f} and covers {100 * own['covers']:.0f} %" in TEXT
    )
    assert f"0.99 instead of the profile's at {tight['stop']:.0f} and {100 * tight['covers']:.0f} %" in TEXT


def least(cells: Sequence[Cell], name: str) -> float:
    """Returns the smallest value, rounded down to three places: so much and more."""
    return math.floor(1000 * min(cell[name] for cell in cells)) / 1000
