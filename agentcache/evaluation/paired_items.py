"""The cells of the paired-edit benchmark and their items: EditLocal's direct and derived conditions, and harder forms. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from agentcache.errors import ConfigError
from agentcache.profiling.datasets import Dataset
from agentcache.profiling.derived import EDIT_AT, ChatFrame, DerivedItem, Encode, derived_items
from agentcache.profiling.derived_text import FORMS, Form

__all__ = ["HARD", "LEAST_TOKENS", "Cell", "background", "cells_of", "draw", "named_forms"]

Condition = Literal["direct", "derived"]

HARD: Final[tuple[Form, ...]] = ("indirect", "paraphrase", "competing", "chain", "two_edits", "length")
"""Forms beside the paper's."""

LEAST_TOKENS: Final = 600
"""Of a context, where no other length is asked for."""

_PAIRED: Final = (
    0.03  # most that the edits of a direct and a derived item of one draw may be apart, as a share of the context
)
_BEHIND: Final = 80  # tokens behind the distance: the carrier and some text
_EDGE: Final = 0.68  # share of the context behind an edit that stands at 32 %


@dataclass(frozen=True, slots=True)
class Cell:
    """One condition: its items are compared with each other alone.

    Attributes:
        condition: `direct`: the edit states the answer; `derived`: it follows from the edit and a text behind it.
        form: See `derived_text.FORMS`.
        distance: Tokens between the edit and the text that the answer is read from.
        tokens: Least tokens of background.
    """

    condition: Condition
    form: Form
    distance: int
    tokens: int

    def __str__(self) -> str:
        form = "" if self.form in ("direct", "table") else f" {self.form}"
        return f"{self.condition}{form} d={self.distance}"


def named_forms(names: Sequence[str]) -> tuple[str, ...]:
    """Returns forms with `hard` written out, each once."""
    return tuple(dict.fromkeys(form for name in names for form in (HARD if name == "hard" else (name,))))


def cells_of(
    conditions: Sequence[str], forms: Sequence[str], distances: Sequence[int], tokens: int | None
) -> list[Cell]:
    """Returns the cells: the direct condition once, the derived one for each form and distance.

    Args:
        conditions: `direct`, `derived`.
        forms: Of the derived condition.
        distances: Of the derived condition.
        tokens: Least tokens of background; None: 600, or as many as a distance needs behind an edit at 32 %.

    Raises:
        ConfigError: A word is not known, a distance is negative or too long for the tokens.
    """
    for given, known, option in ((conditions, ("direct", "derived"), "--conditions"), (forms, FORMS, "--forms")):
        for word in given:
            if word not in known:
                raise ConfigError(f"{option} {word!r} is not known; there are {', '.join(known)}")
    if "direct" in forms:
        raise ConfigError("--forms direct is a condition: --conditions direct")
    found = [Cell("direct", "direct", 0, tokens or LEAST_TOKENS)] if "direct" in conditions else []
    for form in forms if "derived" in conditions else ():
        for distance in distances:
            least = int((distance + _BEHIND) / (1 - EDIT_AT[0])) + 1
            if distance < 0 or (tokens is not None and tokens < least):
                raise ConfigError(
                    f"--distances {distance} needs --tokens of {least} or more: the edit stands at {EDIT_AT[0]:.0%} at least"
                )
            needed = max(LEAST_TOKENS, int((distance + _BEHIND) / _EDGE) + 1)
            found.append(Cell("derived", form, distance, tokens or needed))  # type: ignore[arg-type]
    return found


def background(dataset: Dataset) -> list[str]:
    """Returns the documents of a data set, each once: its questions and answers are not used.

    Raises:
        ConfigError: It has none.
    """
    texts = (result.strip() for task in dataset.tasks for turn in task.turns for result in turn.results)
    found = list(dict.fromkeys(text for text in texts if text))
    if not found:
        raise ConfigError(f"data {dataset.name!r} has no documents")
    return found


def draw(
    cell: Cell,
    encode: Encode,
    documents: Sequence[str],
    frame: ChatFrame,
    *,
    count: int,
    seed: int,
    reply: str = "",
) -> list[DerivedItem]:
    """Returns `count` items of a cell.

    Items of the direct and of the plain derived condition come in pairs, both or none: the same draw of the other condition
    passes the build filters too, and its edit stands within 3 % of the context of this one's.

    Raises:
        ConfigError: The tokenizer or the documents do not fit.
    """
    items = _drawn(cell, encode, documents, frame, count=count, seed=seed, reply=reply)
    if not items:
        raise ConfigError(
            f"{cell}: none of the items of {cell.tokens} tokens passes the build filters; take longer ones (--tokens) or more (--draws)"
        )
    return items


def _drawn(
    cell: Cell, encode: Encode, documents: Sequence[str], frame: ChatFrame, *, count: int, seed: int, reply: str
) -> list[DerivedItem]:
    def made(form: Form) -> list[DerivedItem]:
        return derived_items(
            encode,
            documents,
            frame,
            count=2 * count,
            distance=cell.distance,
            filler_tokens=cell.tokens,
            form=form,
            seed=seed,
            reply=reply,
        )

    items = made(cell.form)
    other: dict[Form, Form] = {"direct": "table", "table": "direct"}
    if cell.form not in other or cell.distance:
        return items[:count]
    twins = {item.draw: item for item in made(other[cell.form])}
    return [item for item in items if item.draw in twins and _paired(item, twins[item.draw])][:count]


def _paired(one: DerivedItem, other: DerivedItem) -> bool:
    first, second = (item.edits[0].start / item.query_start for item in (one, other))
    return abs(first - second) <= _PAIRED
