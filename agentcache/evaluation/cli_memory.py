"""`agentcache eval memory`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from agentcache.evaluation.app import (
    ModelOption,
    OutOption,
    PlotsOption,
    PoliciesOption,
    QuickOption,
    SeedOption,
    eval_app,
    words,
    work_path,
)

if TYPE_CHECKING:
    from agentcache.evaluation.memory import MemoryRun
    from agentcache.evaluation.provenance import DataUse
    from agentcache.profiling.profile import Profile

__all__ = ["memory", "run_memory"]

_QUICK_POLICIES: Final = "mean_shift,direct_reuse"


@eval_app.command("memory")
def memory(
    model: ModelOption = "smollm2",
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="A file or folder of memories with questions (LoCoMo, AMA-Bench) or of questions with documents (HotpotQA, MuSiQue, "
            "2Wiki, your own), or `sample`, the text that ships and the default. One or several.",
        ),
    ] = None,
    out: OutOption = Path("memory.json"),
    items: Annotated[int, typer.Option("--items", min=1, help="Questions of each data set.")] = 100,
    policies: PoliciesOption = "",
    shares: Annotated[
        str, typer.Option("--shares", help="Shares r of the reused tokens, by commas; each policy takes each.")
    ] = "",
    precisions: Annotated[
        str, typer.Option("--precisions", help="How chunks are stored, by commas, or `all`; each arm takes each.")
    ] = "exact",
    units: Annotated[int, typer.Option(min=1, help="Memories that a question is asked with.")] = 6,
    characters: Annotated[int, typer.Option(min=100, help="Of a memory, at most.")] = 800,
    retrieval: Annotated[
        str,
        typer.Option(
            help="`words`: memories nearest to the question. `evidence`: those that hold its evidence, then the nearest."
        ),
    ] = "words",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer; by default as the data needs.")] = None,
    max_model_len: Annotated[int, typer.Option(min=256, help="Longest prompt and answer.")] = 3072,
    shift_items: Annotated[
        int, typer.Option(min=0, help="Questions whose mean shift is looked into, layer by layer.")
    ] = 12,
    host_gib: Annotated[float, typer.Option(min=0.1, help="Memory for chunks, in GiB.")] = 6.0,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    plots: PlotsOption = False,
) -> None:
    """Answer questions from memories whose KV was computed once, by policy and share that is recomputed (AgentKVShift).

    Full recompute is measured in any case. Results name questions by their ids and hold no text of the data.
    """
    from agentcache.config import PRECISIONS
    from agentcache.evaluation.memory import MemoryRun
    from agentcache.evaluation.memory_arms import POLICIES, SHARES, arms_of

    asked = words(policies or (_QUICK_POLICIES if quick else ",".join(POLICIES)), "--policies")
    chosen = [_number(word) for word in words(shares, "--shares")] if shares else [0.1] if quick else list(SHARES)
    stored = list(PRECISIONS) if precisions == "all" else words(precisions, "--precisions")
    settings = MemoryRun(
        model=model,
        out=out,
        arms=tuple(arms_of(asked, chosen, stored)),
        data=tuple(data or ["sample"]),
        items=min(items, 2) if quick else items,
        seed=seed,
        units=min(units, 2) if quick else units,
        characters=characters,
        retrieval=retrieval,
        max_tokens=8 if quick and max_tokens is None else max_tokens,
        max_model_len=max_model_len,
        shift_items=min(shift_items, 1) if quick else shift_items,
        shift_shares=tuple(share for share in chosen if share in (0.1, 0.3)) or tuple(chosen[:1]),
        host_bytes=int(host_gib * (1 << 30)),
        warm=not quick,
    )
    run_memory(settings, Console(), plots=plots)


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise typer.BadParameter(f"--shares: {word!r} is no number; take shares above 0 and below 1") from error


def _profile(settings: MemoryRun, model: str, data: Sequence[DataUse]) -> Profile | None:
    """Returns the model's profile when a policy takes settings from it.

    Raises:
        ConfigError: They were fitted to a file that is measured on.
    """
    from agentcache.config import CacheConfig
    from agentcache.evaluation.provenance import check_disjoint

    profile = CacheConfig.build(model=model).measured
    requests = [arm.request(1, 1) for arm in settings.arms]
    if profile is None or all(profile.options_for(name, options) == options for name, options in requests):
        return None
    check_disjoint(profile, data, requests)
    return profile


def run_memory(settings: MemoryRun, console: Console, *, plots: bool) -> dict[str, Any]:
    """Returns what the JSON holds, after measuring what the work file has not, and writes all files."""
    from agentcache.evaluation.memory import ask_all, select_units
    from agentcache.evaluation.memory_cells import cells_of, pairs_of, retrieval_of, shift_of
    from agentcache.evaluation.memory_data import choose, load_memories
    from agentcache.evaluation.memory_report import plot_memory, plot_shift, sections
    from agentcache.evaluation.provenance import DataUse, fingerprint, provenance
    from agentcache.evaluation.report import write_report
    from agentcache.work_file import WorkFile

    sets = [load_memories(source, characters=settings.characters) for source in settings.data]
    asked = [select_units(data, choose(data, settings.items, settings.seed), settings) for data in sets]
    folder, model = fingerprint(settings.model)
    work = WorkFile(work_path(settings.out))
    uses = [DataUse(data.name, data.hash, settings.items, "questions") for data in sets]
    profile = _profile(settings, settings.model, uses)
    rows: list[dict[str, Any]] = []
    shifts: list[dict[str, Any]] = []
    for data, questions in zip(sets, asked, strict=True):
        more, shifted = ask_all(data, questions, settings, model, folder, work, console)
        rows += more
        shifts += shifted
    dtype = " and ".join(sorted({row["dtype"] for row in rows}))
    cells, by_category = cells_of(rows, model.name, settings.arms, settings.seed)
    result: dict[str, Any] = {
        "part": "memory",
        "cells": cells,
        "by_category": by_category,
        "pairs": pairs_of(rows, model.name, settings.arms, settings.seed),
        "retrieval": retrieval_of(rows),
        "shift": shift_of(shifts, model.name),
        "datasets": [{"dataset": data.name, "hash": data.hash, "evidence": data.evidence} for data in sets],
        "settings": {
            "units": settings.units,
            "characters": settings.characters,
            "retrieval": settings.retrieval,
            "max_tokens": {data.name: settings.max_tokens or data.max_tokens for data in sets},
            "order": "random, seeded by question",
        },
        "per_item": {
            "id": [row["id"] for row in rows],
            "dataset": [row["dataset"] for row in rows],
            "f1": {arm.name: [row["arms"][arm.name]["f1"] for row in rows] for arm in settings.arms},
        },
        "provenance": provenance(model, dtype=dtype, seeds={"items": settings.seed}, data=uses, profile=profile),
    }
    written = write_report(settings.out, result, f"Answers from reused memories: {model.name}", sections(result))
    if plots:
        written += [*plot_memory(cells, settings.out), *plot_shift(result["shift"], settings.out)]
    console.print(f"wrote {', '.join(map(str, written))}")
    return result
