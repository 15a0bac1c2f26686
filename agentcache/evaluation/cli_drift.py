"""`agentcache eval drift`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from agentcache.evaluation.app import ItemsOption, OutOption, PlotsOption, QuickOption, SeedOption, eval_app, work_path

if TYPE_CHECKING:
    from agentcache.evaluation.drift import DriftRun

__all__ = ["drift", "run_drift"]

_ROOM = 64  # tokens beside the longest prompt
_QUICK_PAIRS, _QUICK_TOKENS, _QUICK_SUFFIX = 2, 512, 64


@eval_app.command("drift")
def drift(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="A model folder, a hub id, or the built-in `smollm2`, the default. One or several."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="A file or folder of tasks (HotpotQA, MuSiQue, 2Wiki, AMA-Bench, tau-bench, your own documents), or `sample`, the "
            "text that ships and the default. One or several.",
        ),
    ] = None,
    out: OutOption = Path("drift.json"),
    items: ItemsOption = 48,
    seed: SeedOption = 1,
    max_tokens: Annotated[int, typer.Option(min=256, help="Longest prompt.")] = 2048,
    quick: QuickOption = False,
    plots: PlotsOption = False,
) -> None:
    """Measure how similar stale rows are to exact ones, by distance behind real edits (PatchKV, Fig. 3).

    Each pair of prompts is prefilled before and after its edit. Models of an earlier run with the same --out are not measured
    again, so that one file and one plot can show several.
    """
    from agentcache.evaluation.drift import DriftRun
    from agentcache.profiling.measure import LEAST_SUFFIX

    settings = DriftRun(
        models=tuple(dict.fromkeys(model or ["smollm2"])),
        out=out,
        data=tuple(data or ["sample"]),
        pairs=_QUICK_PAIRS if quick else items,
        seed=seed,
        max_tokens=_QUICK_TOKENS if quick else max_tokens,
        least_suffix=_QUICK_SUFFIX if quick else LEAST_SUFFIX,
    )
    run_drift(settings, Console(), plots=plots)


def run_drift(settings: DriftRun, console: Console, *, plots: bool) -> dict[str, Any]:
    """Returns what the JSON holds, after measuring what the work file has not, and writes all files."""
    from agentcache.evaluation.drift import (
        cells_of,
        choose_pairs,
        layers_of,
        measure_model,
        renderer,
        uses,
        without_doubles,
    )
    from agentcache.evaluation.drift_report import plot_drift, sections
    from agentcache.evaluation.provenance import fingerprint, provenance
    from agentcache.evaluation.report import write_report
    from agentcache.profiling.datasets import load_dataset
    from agentcache.work_file import WorkFile

    datasets = without_doubles(load_dataset(source) for source in settings.data)
    work = WorkFile(work_path(settings.out))
    cells: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []
    for name in settings.models:
        folder, model = fingerprint(name)
        pairs = choose_pairs(datasets, renderer(folder), settings)
        rows = measure_model(pairs, model, partial(_engine, folder, model, settings), work, console)
        cells += cells_of(model.name, rows)
        layers += layers_of(model.name, rows)
        dtype = " and ".join(sorted({row["dtype"] for row in rows}))
        made.append(provenance(model, dtype=dtype, seeds={"edits": settings.seed}, data=uses(datasets, pairs)))
    result = {
        "part": "drift",
        "pairs": settings.pairs,
        "max_tokens": settings.max_tokens,
        "cells": cells,
        "layers": layers,
        "models": [{**each["model"], "data": each["data"]} for each in made],
        "provenance": made[-1],
    }
    written = write_report(settings.out, result, "Drift behind an edit, by distance", sections(cells, layers))
    if plots:
        written += plot_drift(cells, settings.out)
    console.print(f"wrote {', '.join(map(str, written))}")
    return result


def _engine(folder: Path, model: Any, settings: DriftRun) -> Any:
    """Returns an engine whose KV cache holds the two revisions of a pair, and reckons without their shared prefix."""
    from agentcache.cache import AgentCache

    row_bytes = 2 * model.layers * model.kv_heads * model.head_dim * 4  # of the widest type
    longest = settings.max_tokens + _ROOM
    return AgentCache(folder, max_model_len=longest, kv_bytes=max(3 * longest * row_bytes, 1 << 20))
