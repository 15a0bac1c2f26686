"""`agentcache eval paired-edit`: EditLocal's benchmark of edits whose answer is known, on a real model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash
from rich.console import Console

from agentcache.cache import AgentCache
from agentcache.evaluation.app import work_path
from agentcache.evaluation.items import Row, item_key, rotated, run_items
from agentcache.evaluation.paired_arms import BASELINE, NOTES, Arm, Situation, arms_of, options_of
from agentcache.evaluation.paired_bench import PairedBench
from agentcache.evaluation.paired_items import Cell, background, cells_of, draw
from agentcache.evaluation.paired_report import cells_from, report
from agentcache.evaluation.paired_transplant import Transplanted
from agentcache.evaluation.provenance import DataUse, check_disjoint, fingerprint, provenance, spoken_command
from agentcache.profiling.datasets import load_dataset
from agentcache.profiling.derived import ChatFrame, DerivedItem
from agentcache.profiling.lookup import profile_for
from agentcache.profiling.model import ModelFingerprint
from agentcache.work_file import WorkFile

__all__ = ["PairedRun", "run"]

SCHEMA: Final = 1
"""Grows when a measurement means something else than before."""

_ROOM: Final = 800  # tokens beside the background: the last document, the item's texts, the question, the chat template
_TRANSPLANT: Final = Transplanted.__module__


@dataclass(frozen=True, slots=True)
class PairedRun:
    """What is measured.

    Attributes:
        model: A folder, a hub id, or the name of a built-in model.
        out: The result's file.
        conditions: `direct`, `derived`.
        forms: Of the derived condition.
        distances: Of the derived condition.
        policies: Each `name:option=value:…`.
        budgets: K.
        transplants: Policies whose rows are also transplanted.
        items: Kept items a cell.
        draws: Most items a cell that the model is asked.
        exact_every: The exact policy runs on each so manyth item; it costs a full prefill, and what it answers is known.
        tokens: Least tokens of background; None: by distance.
        data: Whose documents are the background.
        seed: Of the items.
        reply: What replies begin with.
        profile: The model's profile.
        plots: Whether plots are drawn.
        overlap: Whether texts that the profile was fitted to may be the background, which shows that it works and is no result.
    """

    model: str
    out: Path
    conditions: tuple[str, ...]
    forms: tuple[str, ...]
    distances: tuple[int, ...]
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    transplants: tuple[str, ...]
    items: int
    draws: int
    exact_every: int
    tokens: int | None
    data: str
    seed: int
    reply: str
    profile: Path | None
    plots: bool
    overlap: bool = False


class _Measured:
    """Measurements of one run's settings in its work file: references and arms, each under its own key."""

    def __init__(self, work: WorkFile, settings: dict[str, Any]) -> None:
        self.work = work
        self.settings = settings

    def get(self, cell: Cell, item: DerivedItem, arm: Arm | None) -> Row | None:
        found = self.work.get(self._key(cell, item, arm))
        return None if found is None else dict(found["row"])

    def put(self, cell: Cell, item: DerivedItem, arm: Arm | None, row: Row) -> Row:
        place = {
            "cell": _place(cell),
            "draw": item.draw,
            "arm": None if arm is None else _arm(arm),
            "command": spoken_command(sys.argv),
        }
        name = f"{cell} #{item.draw} {'reference' if arm is None else arm.label}"
        kept = self.work.put(self._key(cell, item, arm), self.settings | place | {"row": row}, name=name)
        return dict(kept["row"])

    def _key(self, cell: Cell, item: DerivedItem, arm: Arm | None) -> str:
        what = None if arm is None else _arm(arm)
        return item_key(**self.settings, cell=_place(cell), new=item.new, old=item.old, arm=what)

    def rows(self) -> list[Row]:
        """Returns all measurements of these settings, of earlier runs too."""
        return [
            dict(row)
            for row in self.work.rows()
            if all(row.get(name) == value for name, value in self.settings.items())
        ]


def _place(cell: Cell) -> Row:
    return {"condition": cell.condition, "form": cell.form, "distance": cell.distance, "tokens": cell.tokens}


def _arm(arm: Arm) -> Row:
    return {"policy": arm.name, "k": arm.k}


def run(settings: PairedRun, console: Console) -> dict[str, Any]:
    """Measures what the work file lacks, writes the result; returns what its JSON holds.

    The result holds every cell of the work file that was measured with the same model, data and seed: parts of a large run may
    be measured one by one.

    Raises:
        ConfigError: A setting is not allowed.
        AgentCacheError: The engine did not recover what a policy asked for.
    """
    arms = arms_of(settings.policies, settings.budgets, settings.transplants)
    cells = cells_of(settings.conditions, settings.forms, settings.distances, settings.tokens)
    dataset = load_dataset(settings.data)
    documents = background(dataset)
    folder, model = fingerprint(settings.model)
    profile = profile_for(str(folder), settings.profile)
    use = DataUse(dataset.name, dataset.hash, len(documents), "background texts")
    encode, frame = _tokenizer(folder)
    make = functools.partial(
        draw, encode=encode, documents=documents, frame=frame, seed=settings.seed, reply=settings.reply
    )
    if not settings.overlap:
        some = Situation(make(cells[0], count=1)[0], 1, [0])  # a budget gives the same options at every item
        check_disjoint(profile, [use], [options_of(arm, some) for arm in arms])
    common = {
        "schema": SCHEMA,
        "model": model.hash,
        "data": dataset.hash,
        "seed": settings.seed,
        "reply": settings.reply,
        "profile": None if profile is None else xxhash.xxh3_128_hexdigest(profile.to_json().encode()),
    }
    measured = _Measured(WorkFile(work_path(settings.out)), common)
    with ExitStack() as stack:
        longest = max(cell.tokens for cell in cells) + _ROOM
        bench = functools.cache(
            lambda: PairedBench(stack.enter_context(_engine(settings, str(folder), model, longest)))
        )
        for cell in cells:
            _measure(cell, make(cell, count=settings.draws), arms, measured, bench, settings, console)
    rows = measured.rows()
    found = cells_from(rows, model.name)
    dtypes = sorted({row["row"]["dtype"] for row in rows if row["arm"] is None})
    drawn = sum(cell["n_drawn"] for cell in {_cell_of(cell): cell for cell in found["cells"]}.values())
    data = [
        use,
        DataUse("synthetic aliases, tables and questions", common_digest(common), drawn, "items drawn"),
    ]
    result = {
        "provenance": provenance(
            model,
            dtype=" and ".join(dtypes),
            seeds={"items": settings.seed, "bootstrap": 0},
            data=data,
            profile=profile,
        ),
        "commands": sorted({row["command"] for row in rows if "command" in row}),
        "reply": settings.reply,
        "budgets": NOTES,
        **found,
    }
    report(settings.out, result, plots=settings.plots, console=console)
    return result


def _cell_of(cell: Row) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("condition", "form", "distance", "tokens"))


def common_digest(common: dict[str, Any]) -> str:
    """Returns what names the items of a run."""
    return item_key(**common)


def _measure(
    cell: Cell,
    items: Sequence[DerivedItem],
    arms: Sequence[Arm],
    measured: _Measured,
    bench: Callable[[], PairedBench],
    settings: PairedRun,
    console: Console,
) -> None:
    """Measures a cell's items until enough are kept."""
    wanted, every = settings.items, settings.exact_every

    def arms_at(number: int) -> list[Arm]:
        return [arm for arm in arms if arm.name != BASELINE or number % every == 0]

    def measure(numbered: tuple[int, DerivedItem]) -> Row:
        number, item = numbered
        known = measured.get(cell, item, None)
        missing = [arm for arm in arms_at(number) if measured.get(cell, item, arm) is None]
        if known is None or (known["kept"] and missing):
            fresh = bench().reference(item, kept=known is not None)
            known = known or measured.put(cell, item, None, fresh)
            for arm in rotated(missing, number) if known["kept"] else ():
                measured.put(cell, item, arm, bench().repair(item, arm))
        return {"kept": known["kept"]}

    keyed = [
        (
            item_key(
                of=measured.settings, cell=_place(cell), new=item.new, old=item.old, arms=[a.label for a in arms_at(at)]
            ),
            at,
        )
        for at, item in enumerate(items)
    ]
    rows = run_items(
        [(key, (at, items[at])) for key, at in keyed],
        measure,
        work=measured.work,
        label=str(cell),
        console=console,
        enough=lambda rows: sum(row["kept"] for row in rows) >= wanted,
    )
    kept = sum(row["kept"] for row in rows)
    if kept < wanted:
        console.print(f"{cell}: the model answers {kept} of {len(rows)} items, {wanted} were asked for; see --draws")


def _tokenizer(folder: Path) -> tuple[Callable[[str], Sequence[int]], ChatFrame]:
    """Returns a model's encoder and its chat template's frame, without an engine."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    return encode, ChatFrame.of(render)


def _engine(
    settings: PairedRun, folder: str, model: ModelFingerprint, longest: int
) -> AbstractContextManager[AgentCache]:
    """Returns an engine whose KV cache holds both prompts of an item."""
    row_bytes = 2 * model.layers * model.kv_heads * model.head_dim * 4  # of the widest type
    return AgentCache(
        folder,
        max_model_len=longest,
        kv_bytes=4 * longest * row_bytes,
        profile=settings.profile,
        connector={"attention": True, "policy_modules": [_TRANSPLANT]},
    )
