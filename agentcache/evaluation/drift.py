"""`agentcache eval drift`: how similar stale rows are to exact ones, by distance behind the edit and model (PatchKV, Fig. 3).

Real edits (`profiling.edits`), paired prefills, every layer (`engine.drift_probe`). The similarity of a block of 32 tokens is the mean
over layers and tokens (**choice**; the paper does not say how layers are put together), and each layer is reported by itself too.
Nothing is fitted, so there is nothing that the data could have been fitted to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from rich.console import Console

from agentcache.errors import ConfigError
from agentcache.evaluation.items import Row, item_key, run_items
from agentcache.evaluation.provenance import DataUse
from agentcache.profiling.datasets import SAMPLE, Dataset
from agentcache.profiling.edits import Edit, make_edits
from agentcache.profiling.measure import LEAST_SUFFIX, Pair, Render, pairs_of
from agentcache.profiling.model import ModelFingerprint
from agentcache.work_file import WorkFile

__all__ = ["KINDS", "DriftRun", "Prober", "cells_of", "choose_pairs", "layers_of", "measure_model", "renderer", "uses"]

KINDS: Final = ("value", "key", "key_in_place")
"""Stale values, stale keys after phase correction, and stale keys without it."""

_SCHEMA = 1  # of a pair's measurement
_CHARACTERS_A_TOKEN = 3.5
_SHORTEST_SHARE = 0.25  # of the longest prompt
_SPARE = 4  # edits made for each that is wanted: some are too long, and many leave too little behind them
_DAY = datetime(2026, 1, 1, tzinfo=UTC)
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class DriftRun:
    """What a drift curve is made of.

    Attributes:
        models: Folders, hub ids, or names of built-in models.
        out: The result's file.
        data: Files or folders of tasks, see `profiling.datasets`.
        pairs: Edits of each model.
        seed: Of the edits.
        max_tokens: Longest prompt.
        least_suffix: Fewest tokens behind an edit.
    """

    models: tuple[str, ...]
    out: Path
    data: tuple[str, ...] = (SAMPLE,)
    pairs: int = 48
    seed: int = 1
    max_tokens: int = 2048
    least_suffix: int = LEAST_SUFFIX


class Prober(Protocol):
    """What a run needs of an `AgentCache`."""

    def probe(self, name: Any, *args: Any) -> dict[str, Any]:
        """Returns what a probe measures."""

    def stats(self) -> dict[str, Any]:
        """Returns what is known of the engine."""


def choose_pairs(datasets: Sequence[Dataset], render: Render, settings: DriftRun) -> list[Pair]:
    """Returns the edits to measure; the data sets take turns, and in each the tasks.

    Raises:
        ConfigError: There are fewer than wanted.
    """
    found = [list(islice(_pairs(each, render, settings), settings.pairs)) for each in datasets]
    turns = (pair for turn in zip_longest(*found) for pair in turn if pair is not None)
    pairs = list(islice(turns, settings.pairs))
    if len(pairs) < settings.pairs:
        raise ConfigError(
            f"the data is too short: {len(pairs)} edits of it leave {settings.least_suffix} tokens behind them and fit in "
            f"{settings.max_tokens}, {settings.pairs} are wanted; give more --data, fewer --items, or another --max-tokens"
        )
    return pairs


def _pairs(dataset: Dataset, render: Render, settings: DriftRun) -> Iterator[Pair]:
    longest = int(settings.max_tokens * _CHARACTERS_A_TOKEN)
    chains: dict[str, list[Edit]] = {}
    for edit in make_edits(
        dataset.tasks,
        seed=settings.seed,
        per_task=max(4, -(-_SPARE * settings.pairs // max(1, len(dataset.tasks)))),
        characters=(int(longest * _SHORTEST_SHARE), longest),
    ):
        chains.setdefault(edit.task, []).append(edit)
    edits = (edit for turn in zip_longest(*chains.values()) for edit in turn if edit is not None)
    return pairs_of(edits, render, max_tokens=settings.max_tokens, least_suffix=settings.least_suffix)


def measure_model(
    pairs: Sequence[Pair],
    model: ModelFingerprint,
    open_engine: Callable[[], AbstractContextManager[Prober]],
    work: WorkFile,
    console: Console,
) -> list[Row]:
    """Returns what each pair shows; the engine starts when the first one must be measured."""
    with ExitStack() as stack:
        engine = functools.cache(lambda: stack.enter_context(open_engine()))

        def measure(pair: Pair) -> Row:
            found = engine().probe("drift", pair.old, pair.new)
            return {"pair": pair.id, "dataset": pair.dataset, "dtype": engine().stats()["engine"]["dtype"], **found}

        items = [
            (item_key(part="drift", schema=_SCHEMA, model=model.hash, dtype=model.dtype, old=p.old, new=p.new), p)
            for p in pairs
        ]
        return run_items(items, measure, work=work, label=f"drift of {model.name}", console=console)


def cells_of(model: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one cell a distance block: median and quartiles over the pairs that reach so far.

    `KIND` is the median of a kind's similarity, `KIND_iqr` its quartiles; `n` the pairs.
    """
    curves = {kind: [np.array(row[kind]).mean(axis=0) for row in rows] for kind in KINDS}
    blocks = {row["block"] for row in rows}
    assert len(blocks) == 1, f"pairs were measured in blocks of {sorted(blocks)}"
    size = blocks.pop()
    cells = []
    for at in range(max(map(len, curves["value"]))):
        cell: dict[str, Any] = {"model": model, "block": at, "distance": at * size}
        for kind in KINDS:
            here = [curve[at] for curve in curves[kind] if len(curve) > at]
            low, middle, high = np.percentile(here, [25, 50, 75])
            cell |= {"n": len(here), kind: _rounded(middle), f"{kind}_iqr": [_rounded(low), _rounded(high)]}
        cells.append(cell)
    return cells


def layers_of(model: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one entry a layer: the median over pairs of each kind's similarity in the first and in the last block."""
    out = []
    for layer in range(len(rows[0]["value"])):
        entry: dict[str, Any] = {"model": model, "layer": layer}
        for kind in KINDS:
            for name, at in (("first", 0), ("last", -1)):
                entry[f"{kind}_{name}"] = _median(row[kind][layer][at] for row in rows)
        out.append(entry)
    return out


def uses(datasets: Sequence[Dataset], pairs: Sequence[Pair]) -> list[DataUse]:
    """Returns which data the pairs are from."""
    tasks = {task.id: at for at, dataset in enumerate(datasets) for task in dataset.tasks}
    counts = [0] * len(datasets)
    for pair in pairs:
        counts[tasks[pair.task]] += 1
    return [
        DataUse(dataset.name, dataset.hash, count, "edits")
        for dataset, count in zip(datasets, counts, strict=True)
        if count
    ]


def renderer(folder: Path) -> Render:
    """Returns what renders chats by a model's template, without an engine and on a day that does not change."""
    from transformers import AutoTokenizer

    from agentcache.episodes.render import Renderer

    made = Renderer(AutoTokenizer.from_pretrained(folder))
    return lambda messages: made.render(messages, now=_DAY).token_ids.tolist()


def without_doubles(datasets: Iterable[Dataset]) -> list[Dataset]:
    """Returns the data sets without tasks that an earlier one has too."""
    known: set[str] = set()
    out = []
    for dataset in datasets:
        tasks = tuple(task for task in dataset.tasks if task.id not in known)
        known |= {task.id for task in tasks}
        out.append(replace(dataset, tasks=tasks))
    return out


def _median(values: Iterable[float]) -> float:
    return _rounded(float(np.median(list(values))))


def _rounded(value: float | npt.NDArray[np.float64]) -> float:
    return round(float(value), _DIGITS)
