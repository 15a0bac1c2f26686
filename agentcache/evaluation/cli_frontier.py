"""`agentcache eval frontier`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from agentcache.errors import ConfigError
from agentcache.evaluation.app import (
    ItemsOption,
    ModelOption,
    OutOption,
    PoliciesOption,
    ProfileOption,
    QuickOption,
    SeedOption,
    eval_app,
    words,
    work_path,
)

if TYPE_CHECKING:
    from agentcache.evaluation.frontier import FrontierRun

__all__ = ["frontier", "matches_in", "run_frontier"]

_ROOM: Final = 64  # tokens beside the longest prompt
_GROWN: Final = "length_model=null:most_tokens=4096"  # from its own first step, without a bound
_POLICIES: Final = f"frontier:{_GROWN},frontier:threshold=0.99:{_GROWN},frontier:threshold=0.98:{_GROWN},frontier"
_QUICK_PAIRS, _QUICK_TOKENS = 2, 768


@eval_app.command("frontier")
def frontier(
    model: ModelOption = "smollm2",
    out: OutOption = Path("frontier.json"),
    policies: PoliciesOption = _POLICIES,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="A file or folder of tasks, or `sample`, the text that ships. One or several."),
    ] = None,
    items: ItemsOption = 48,
    seed: SeedOption = 1,
    max_tokens: Annotated[int, typer.Option(min=256, help="Longest prompt.")] = 1536,
    tau_v: Annotated[
        float | None,
        typer.Option(
            "--tau", min=0.0, help="Deviation up to which a block is clean; by default the profile's, or 0.005."
        ),
    ] = None,
    gamma: Annotated[
        float, typer.Option("--gamma", min=0.0, max=1.0, help="Share of a tail that must be clean.")
    ] = 0.98,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--results",
            help="JSON of `paired-edit` or `qa` with arms of `frontier` and of `patchkv:window=…:kappa=0`, to be compared at equal cost.",
        ),
    ] = None,
    profile: ProfileOption = None,
    quick: QuickOption = False,
) -> None:
    """Measure where `frontier` stops against the oracle boundary of real edits, and what it is worth at equal cost."""
    from agentcache.evaluation.frontier import FrontierRun

    settings = FrontierRun(
        model=model,
        out=out,
        policies=tuple(words(policies, "--policies")),
        data=tuple(data or ["sample"]),
        pairs=_QUICK_PAIRS if quick else items,
        seed=seed,
        max_tokens=_QUICK_TOKENS if quick else max_tokens,
        tau_v=tau_v,
        gamma=gamma,
        profile=profile,
    )
    run_frontier(settings, Console(), results or ())


def run_frontier(settings: FrontierRun, console: Console, results: Sequence[Path] = ()) -> dict[str, Any]:
    """Returns what the JSON holds, after measuring what the work file has not, and writes all files."""
    from agentcache.cache import AgentCache
    from agentcache.config import CacheConfig
    from agentcache.evaluation.drift import DriftRun, choose_pairs, renderer, uses, without_doubles
    from agentcache.evaluation.frontier import Stops, one_edit, stop_cells, stop_key
    from agentcache.evaluation.items import run_items
    from agentcache.evaluation.provenance import fingerprint, provenance
    from agentcache.evaluation.report import write_report
    from agentcache.profiling.datasets import load_dataset
    from agentcache.recovery import get_policy
    from agentcache.recovery.spec import parse_policy
    from agentcache.work_file import WorkFile

    matches = [match for path in results for match in matches_in(path)]  # before anything is measured
    datasets = without_doubles(load_dataset(source) for source in settings.data)
    folder, model = fingerprint(settings.model)
    longest = settings.max_tokens + _ROOM
    row_bytes = 2 * model.layers * model.kv_heads * model.head_dim * 4  # of the widest type
    engine: dict[str, Any] = {
        "model": settings.model,
        "max_model_len": longest,
        "kv_bytes": max(4 * longest * row_bytes, 1 << 20),
        "profile": settings.profile,
        "connector": {"attention": True},
    }
    config = CacheConfig.build(**engine)
    arms: dict[str, dict[str, Any]] = {}
    for spec in settings.policies:
        name, given = parse_policy(spec)
        arms[spec] = dict(config.options_for(name, given))
        get_policy(name, arms[spec])
    measured = config.measured
    tau_v = settings.tau_v if settings.tau_v is not None else 0.005 if measured is None else measured.length.tau_v
    wanted = DriftRun(
        (settings.model,), settings.out, settings.data, 4 * settings.pairs, settings.seed, settings.max_tokens
    )
    pairs = [*islice(_fitting(datasets, renderer(folder), wanted, choose_pairs, one_edit), settings.pairs)]
    if len(pairs) < settings.pairs:
        raise ConfigError(
            f"{len(pairs)} edits leave one run behind them, {settings.pairs} are wanted; give more --data or fewer --items"
        )
    with ExitStack() as stack:
        stops = functools.cache(lambda: Stops(stack.enter_context(AgentCache(**engine)), arms))
        rows = run_items(
            [(stop_key(pair, model.hash, arms), (pair, number)) for number, pair in enumerate(pairs)],
            lambda each: stops()(*each),
            work=WorkFile(work_path(settings.out)),
            label=f"stops of {model.name}",
            console=console,
        )
    cells = stop_cells(rows, model.name, tau_v=tau_v, gamma=settings.gamma)
    result = {
        "part": "frontier",
        "tau_v": tau_v,
        "gamma": settings.gamma,
        "cells": cells,
        "matched": matches,
        "policies": arms,
        "per_item": {
            "pair": [row["pair"] for row in rows],
            "stop": {arm: [row["arms"][arm]["stop"] for row in rows] for arm in arms},
        },
        "provenance": provenance(
            model,
            dtype=" and ".join(sorted({row["dtype"] for row in rows})),
            seeds={"edits": settings.seed},
            data=uses(datasets, pairs),
            profile=measured,
        ),
    }
    written = write_report(settings.out, result, f"Where windows stop: {model.name}", _sections(result))
    console.print(f"wrote {', '.join(map(str, written))}")
    return result


def _fitting(datasets: Any, render: Any, wanted: Any, choose: Any, fits: Any) -> Iterator[Any]:
    """Yields pairs whose edit leaves one run; of as many as the data has, where it has fewer than are looked through."""
    while wanted.pairs:
        try:
            found = choose(datasets, render, wanted)
        except ConfigError:
            wanted = replace(wanted, pairs=wanted.pairs // 2)
            continue
        yield from (pair for pair in found if fits(pair))
        return


def matches_in(path: Path) -> list[dict[str, Any]]:
    """Returns `frontier.matched` of each cell of a result.

    Raises:
        ConfigError: It is no result of `paired-edit` or `qa` with what each item showed, or lacks the arms.
    """
    from agentcache.evaluation.frontier import matched

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        parts = found["per_item"]
        groups: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = (
            [(f"{p['condition']}, d = {p['distance']}", p["mr"], p["recompute_ratio"]) for p in parts]
            if isinstance(parts, list)
            else [("F1", parts["f1"], parts["recompute_ratio"])]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of paired-edit or qa that tells of each item: {error!r}") from error
    try:
        return [
            {"result": path.name, "of": of, **row} for of, mr, ratio in groups for row in matched(mr, ratio, _is_window)
        ]
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error}; measure it with --policies patchkv:window=64:kappa=0,…,frontier"
        ) from error


def _is_window(arm: str) -> bool:
    from agentcache.recovery.spec import parse_policy

    name, options = parse_policy(arm.split("@")[0])
    return name == "patchkv" and options.get("kappa") == 0 and "window" in options


def _sections(result: Mapping[str, Any]) -> list[Any]:
    from agentcache.evaluation.report import Column, Section, interval, number

    policy = Column("policy", lambda cell: str(cell["policy"]), left=True)
    out = [
        Section(
            "Stops and oracle boundaries",
            result["cells"],
            [
                policy,
                Column("n", lambda cell: str(cell["n"])),
                Column("stop", interval("stop", "stop_ci", 0)),
                Column("boundary", number("boundary", 0)),
                Column("past it, median", interval("past_median", "past_iqr", 0)),
                Column("covers", number("covers", 0, percent=True)),
                Column("missed", number("missed", 0)),
                Column("spent", number("spent", 0)),
                Column("of S", number("recompute_ratio", 1, percent=True)),
            ],
            f"Tokens behind the edit. Boundary: from there on {result['gamma']:.0%} of the blocks deviate by {result['tau_v']:g} at most. "
            "Past it: stop less boundary, quartiles in brackets. Covers: edits whose stop is not before it. Missed: mean tokens between "
            "a stop and a boundary behind it; spent: behind a boundary before it.",
        )
    ]
    if result["matched"]:
        out.append(
            Section(
                "At equal cost",
                result["matched"],
                [
                    Column("of", lambda cell: f"{cell['result']}: {cell['of']}", left=True),
                    policy,
                    Column("n", lambda cell: str(cell["n"])),
                    Column("recomputed", number("recompute_ratio", 1, percent=True)),
                    Column("frontier", number("value", 3)),
                    Column("windows", number("window_value", 3)),
                    Column("difference", interval("difference", "difference_ci", 3)),
                    Column(
                        "", lambda cell: "outside of the windows' shares" if cell["extrapolated"] else "", left=True
                    ),
                ],
                "MR, or F1 from 0 to 1, of `frontier` and of fixed windows (`patchkv`, κ = 0) interpolated to the same mean share of "
                "recomputed tokens, item by item, with 95 % bootstrap intervals.",
            )
        )
    return out
