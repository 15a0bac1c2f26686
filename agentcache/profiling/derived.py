"""Derived items: edits whose effect on the answer stands far behind them, as EditLocal measures repair (editlocal.txt, 'derived').

An item's prompt says which key a name is an alias of and holds, `distance` tokens later, a table from keys to values; the question
asks for the value. The edit changes the key alone, so the answer changes, but the table's rows that carry it are token-identical
and stale: they stood behind the old key when they were computed. Around both lies real text that the caller gives.

```
opening · documents · "Alias of Kalmar: Alpha" · distance · "Lookup table: ..." · documents · question · closing
                               ^ edit                        ^ carrier                        ^ query_start
```

The form `direct` is the paper's other condition: the edited line itself states the value that the question asks for.

Pure: no torch, no vLLM, no tokenizer of its own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentcache.errors import ConfigError
from agentcache.profiling.derived_text import FORMS, Form, Script, write_script
from agentcache.types import Run

__all__ = ["EDIT_AT", "ChatFrame", "DerivedItem", "Encode", "derived_items", "is_kept", "margin", "margin_recovery"]

EDIT_TOKENS: Final = 6
"""Most tokens of an edit (EditLocal, Paired edit benchmark)."""

EDIT_AT: Final = (0.25, 0.4)
"""Where an edit lies, as a share of the context (the same)."""

_OPENING = '"(['  # what a value follows without a space
_BEFORE_EDIT = 0.3  # share of the context that should stand before the edit
_MIN_EFFECT = 0.5  # nats of margin: items whose answer the edit hardly moves say nothing about a repair
_TRIES = 50  # draws an item before the tokenizer is held to be the reason

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """A chat template's text around one user message.

    Attributes:
        opening: Before the message.
        closing: After it, to where the reply begins.
    """

    opening: str
    closing: str

    @classmethod
    def of(cls, render: Callable[[list[dict[str, str]]], str]) -> ChatFrame:
        """Returns the frame of a chat template.

        Args:
            render: Messages to the prompt's text, the generation prompt included.

        Raises:
            ConfigError: The template does not give the user's message as it is.
        """
        mark = "Here stands the context."
        system = {"role": "system", "content": "Answer with one word only."}
        opening, found, closing = render([system, {"role": "user", "content": mark}]).partition(mark)
        if not found:
            raise ConfigError(f"the chat template does not give the user's message as it is: {opening!r}")
        return cls(opening, closing)


@dataclass(frozen=True, slots=True)
class DerivedItem:
    """One edit, or two at once, and what they should do to the answer.

    Attributes:
        draw: Number of the draw: items of other forms and distances with the same number, seed and length share their texts, name
            and values.
        form: What the edit changes, and how the question points at the carrier.
        distance: Tokens of other text between the edit's line and the carrier.
        old: Ids of the whole prompt before the edit.
        new: And after it: equal outside of the edits.
        edits: The rows of the new prompt that differ, one run for each edit.
        carrier: The rows that the new answer must be read from: the table that is asked for, or the edit that states it.
        boundary: Rows between an edit and the end of the document that it lies in, the most of all edits.
        query_start: First row of the question; the rows from there on are never cached.
        old_query_start: The same in the old prompt.
        old_value: Ids of the answer before the edit.
        new_value: And after it.
    """

    draw: int
    form: Form
    distance: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    edits: tuple[Run, ...]
    carrier: Run
    boundary: int
    query_start: int
    old_query_start: int
    old_value: tuple[int, ...]
    new_value: tuple[int, ...]

    @property
    def edit(self) -> Run:
        """The rows from the first that differs to the last."""
        return Run(self.edits[0].start, self.edits[-1].stop)

    @property
    def old_answer(self) -> int:
        """First token of the answer before the edit."""
        return self.old_value[0]

    @property
    def new_answer(self) -> int:
        """First token of the answer after it."""
        return self.new_value[0]


def derived_items(
    encode: Encode,
    documents: Sequence[str],
    frame: ChatFrame,
    *,
    count: int,
    distance: int,
    filler_tokens: int = 500,
    form: Form = "table",
    seed: int = 0,
    reply: str = "",
) -> list[DerivedItem]:
    """Returns `count` items; equal arguments give equal items, and more of them begin with the same.

    An item is left out where old and new prompt do not differ in spans of at most six tokens, equally long but for the form
    `length`, or where the edit does not lie between 25 % and 40 % of the prompt: build filters of EditLocal. The background holds
    no word of the item.

    Args:
        encode: Text to ids, without special tokens of its own.
        documents: Real texts to stand around; each is used again only when all were.
        frame: The chat template around the prompt.
        count: How many items.
        distance: Tokens between the edit's line and the carrier; 0: they are neighbours.
        filler_tokens: Least tokens of documents in a prompt.
        form: What the edit changes, and how the question points at the carrier.
        seed: Of every choice.
        reply: What the reply begins with, for models that would not begin with the value; `{name}` in it is the name that is
            asked about.

    Raises:
        ConfigError: An argument is not allowed, or the tokenizer does not fit: it has no pair of keys of equal length or cuts the
            values so that they begin alike.
    """
    if form not in FORMS:
        raise ConfigError(f"form={form!r} is not known; there are {', '.join(FORMS)}")
    if not documents or not all(documents):
        raise ConfigError("documents must hold at least one text, and no empty one")
    if count < 1 or filler_tokens < 1 or not 0 <= distance < filler_tokens:
        raise ConfigError(
            f"count={count} and filler_tokens={filler_tokens} must be at least 1, and 0 <= distance={distance} < filler_tokens"
        )
    items: list[DerivedItem] = []
    for number in range(_TRIES * count):
        script = write_script(random.Random(f"{seed}:{number}:words"), form)
        filler = _filler(random.Random(f"{seed}:{number}:texts"), encode, documents, script, filler_tokens)
        item = None if filler is None else _compose(encode, frame, script, *filler, number, form, distance, reply)
        if item is not None:
            items.append(item)
        if len(items) == count:
            return items
    raise ConfigError(
        f"{len(items)} of {count} items after {_TRIES * count} draws: this tokenizer gives the keys different lengths or the "
        f"values one first token, or the documents are shorter than distance={distance} behind the edit"
    )


def _filler(
    rng: random.Random, encode: Encode, documents: Sequence[str], script: Script, tokens: int
) -> tuple[list[str], list[str]] | None:
    """Returns documents without the item's words, those before the edit and those behind it; None where there are none."""
    own = re.compile(rf"\b({'|'.join(script.words)})\b", re.IGNORECASE)
    free = [text for text in rng.sample(documents, len(documents)) if not own.search(text)]
    if not free:
        return None
    chosen: list[str] = []
    sizes: list[int] = []
    while sum(sizes) < tokens:
        chosen.append(free[len(chosen) % len(free)])
        sizes.append(len(encode(chosen[-1])))
    wanted = _BEFORE_EDIT * sum(sizes)
    before = min(range(len(sizes)), key=lambda at: abs(sum(sizes[:at]) - wanted))
    return chosen[:before], chosen[before:]


def _compose(
    encode: Encode,
    frame: ChatFrame,
    script: Script,
    before: Sequence[str],
    behind: Sequence[str],
    number: int,
    form: Form,
    distance: int,
    reply: str,
) -> DerivedItem | None:
    """Returns an item, or None when the tokenizer or the documents do not fit what was drawn."""
    opening = frame.opening + "\n\n".join(["Context:", *before, ""])
    rest = list(encode("\n" + "\n\n".join(behind)))
    query = encode(f"\n\nQuestion: {script.question}{frame.closing}{reply.replace('{name}', script.words[0])}")
    space = " " if reply and reply[-1] not in _OPENING else ""
    old_value, new_value = (tuple(encode(f"{space}{value}")) for value in script.values)
    if len(rest) <= distance or old_value[0] == new_value[0]:
        return None
    old, new = (list(encode(opening + line)) for line in script.head)
    edits, ends = [_differing(old, new)], [len(new)]  # each edit, and where its document ends
    at, carrier, together = 0, None, True  # whether the last edit's document goes on
    for piece in script.pieces:
        place = int(piece.place * distance)
        gap = [*rest[at:place], *encode("\n\n")] if place > at else []
        at, together = place, together and not gap
        start = len(new) + len(gap)
        first, second = encode(piece.old), encode(piece.new)
        if first != second:
            run = _differing(first, second)
            edits.append(Run(start + run.start, start + run.stop))
            ends.append(start + len(second))
            together = True
        elif together:
            ends[-1] = start + len(second)
        old += [*gap, *first]
        new += [*gap, *second]
        if piece.carrier:
            carrier = Run(start, len(new))
    item = DerivedItem(
        draw=number,
        form=form,
        distance=distance,
        old=(*old, *rest[at:], *query),
        new=(*new, *rest[at:], *query),
        edits=tuple(edits),
        carrier=carrier or edits[0],
        boundary=max(end - edit.stop for edit, end in zip(edits, ends, strict=True)),
        query_start=len(new) + len(rest) - at,
        old_query_start=len(old) + len(rest) - at,
        old_value=old_value,
        new_value=new_value,
    )
    return item if _is_built(item) else None


def _differing(old: Sequence[int], new: Sequence[int]) -> Run:
    """Returns the rows of `new` without what both begin and end with: what an edit changed."""
    most = min(len(old), len(new))
    head = next((at for at in range(most) if old[at] != new[at]), most)
    tail = next((at for at in range(most - head) if old[-1 - at] != new[-1 - at]), most - head)
    return Run(head, len(new) - tail)


def _is_built(item: DerivedItem) -> bool:
    """Whether an item passes the build filters."""
    same_length = len(item.old) == len(item.new)
    spans = [run.stop - run.start for run in item.edits]
    place = item.edits[0].start / item.query_start
    return (
        same_length == (item.form != "length")
        and all(0 < span <= EDIT_TOKENS for span in spans)
        and EDIT_AT[0] <= place <= EDIT_AT[1]
    )


def margin(logprobs: Mapping[int, float], item: DerivedItem) -> float:
    """Returns `m = log p(new answer) - log p(old answer)` of the first generated token (EditLocal, formulas 2).

    Args:
        logprobs: Log-probabilities by token id that hold both answers; the whole vocabulary always does.
        item: The item that they belong to.

    Raises:
        ValueError: One of the answers is missing.
    """
    missing = {item.old_answer, item.new_answer} - logprobs.keys()
    if missing:
        raise ValueError(f"the log-probabilities lack the answers {sorted(missing)}; ask for logprobs=-1")
    return logprobs[item.new_answer] - logprobs[item.old_answer]


def margin_recovery(policy: float, stale: float, oracle: float) -> float:
    """Returns `MR = (m_policy - m_stale) / (m_oracle - m_stale)` (EditLocal, formulas 2): 0 no repair, 1 a full prefill.

    Args:
        policy: Margin after the repair.
        stale: Margin before it. Where the question is computed afresh it is that of the old prompt.
        oracle: Margin of a full prefill of the new prompt.

    Raises:
        ValueError: The edit has no effect on the margin.
    """
    if oracle == stale:
        raise ValueError(f"stale and oracle margins are both {stale}: this item cannot tell a repair from none")
    return (policy - stale) / (oracle - stale)


def is_kept(stale: float, oracle: float) -> bool:
    """Whether an item can be used: the model answers it (a positive oracle margin) and the edit moves the margin by 0.5 nats."""
    return oracle > 0 and oracle - stale > _MIN_EFFECT
