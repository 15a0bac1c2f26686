"""Derived items: edits whose effect on the answer stands far behind them, as EditLocal measures repair (editlocal.txt, 'derived').

An item's prompt says which key a name is an alias of and holds, `distance` tokens later, a table from keys to values; the question
asks for the value. The edit changes the key alone, so the answer changes, but the table's rows that carry it are token-identical
and stale: they stood behind the old key when they were computed. Around both lies real text that the caller gives.

```
opening · documents · "Alias of Kalmar: Alpha" · distance · "Lookup table: ..." · documents · question · closing
                               ^ edit                        ^ carrier                        ^ query_start
```

Pure: no torch, no vLLM, no tokenizer of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from agentcache.errors import ConfigError
from agentcache.types import Run

__all__ = ["FORMS", "ChatFrame", "DerivedItem", "Form", "derived_items", "is_kept", "margin", "margin_recovery"]

Form = Literal["table", "indirect", "competing", "paraphrase"]
FORMS: tuple[Form, ...] = get_args(Form)
"""`table`: the question names the alias and the table. `indirect`: it names neither, so that no word of it stands in the carrier.
`competing`: three tables have the same keys and the question is about one of them. `paraphrase`: the table has digits where the
alias has the words for them, so that no token of the edit stands in the carrier."""

_NAMES = ("Orlan", "Vestri", "Kalmar", "Tibor", "Nerida", "Jovane", "Quill", "Marek")
_KEYS = (("Alpha", "Beta"), ("Red", "Blue"), ("North", "South"))
_NUMBERS = (("one", "two"), ("three", "seven"), ("five", "nine"))
_DIGITS = {"one": "1", "two": "2", "three": "3", "five": "5", "seven": "7", "nine": "9"}
_VALUES = ("copper", "salt", "timber", "wool", "grain", "glass", "silver", "coal")
_SEASONS = ("spring", "summer", "winter")
_BEFORE_EDIT = 0.3  # share of the documents that stand before the edit
_MIN_EFFECT = 0.5  # nats of margin: items whose answer the edit hardly moves say nothing about a repair
_TRIES = 50  # draws an item before the tokenizer is held to be the reason

_QUESTIONS: dict[Form, str] = {
    "table": "What is the lookup table value for the alias of {name}?",
    "indirect": "Which material belongs to {name}?",
    "paraphrase": "What is the lookup table value for the alias of {name}?",
    "competing": "What is the {season} lookup table value for the alias of {name}?",
}


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
    """One edit and what it should do to the first token of the answer.

    Attributes:
        form: How the question points at the carrier.
        distance: Tokens of other text between the edit's line and the carrier.
        old: Ids of the whole prompt before the edit.
        new: And after it: as many, equal outside of `edit`.
        edit: The rows that differ, from the first to the last.
        carrier: The rows that the new answer must be read from: the table that is asked for.
        query_start: First row of the question; the rows from there on are never cached.
        old_answer: First token of the answer before the edit.
        new_answer: And after it.
    """

    form: Form
    distance: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    edit: Run
    carrier: Run
    query_start: int
    old_answer: int
    new_answer: int


def derived_items(
    encode: Callable[[str], Sequence[int]],
    documents: Sequence[str],
    frame: ChatFrame,
    *,
    count: int,
    distance: int,
    filler_tokens: int = 500,
    form: Form = "table",
    seed: int = 0,
) -> list[DerivedItem]:
    """Returns `count` items; equal arguments give equal items, and more of them begin with the same.

    Args:
        encode: Text to ids, without special tokens of its own.
        documents: Real texts to stand around; drawn with repetition.
        frame: The chat template around the prompt.
        count: How many items.
        distance: Tokens between the edit's line and the carrier; 0: they are neighbours.
        filler_tokens: Least tokens of documents in a prompt.
        form: How the question points at the carrier.
        seed: Of every choice.

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
    rng = random.Random(f"{seed}:{form}:{distance}:{filler_tokens}")
    items: list[DerivedItem] = []
    for _ in range(_TRIES * count):
        item = _draw(rng, encode, documents, frame, distance, filler_tokens, form)
        if item is not None:
            items.append(item)
        if len(items) == count:
            return items
    raise ConfigError(
        f"{len(items)} of {count} items after {_TRIES * count} draws: this tokenizer gives the keys different lengths or the "
        f"values one first token, or the documents are shorter than distance={distance} behind the edit"
    )


def _draw(
    rng: random.Random,
    encode: Callable[[str], Sequence[int]],
    documents: Sequence[str],
    frame: ChatFrame,
    distance: int,
    filler_tokens: int,
    form: Form,
) -> DerivedItem | None:
    """Returns an item, or None when the tokenizer does not fit what was drawn."""
    name, keys, values = (
        rng.choice(_NAMES),
        rng.choice(_NUMBERS if form == "paraphrase" else _KEYS),
        rng.sample(_VALUES, len(_VALUES)),
    )
    chosen: list[str] = []
    size = 0
    while size < filler_tokens:
        chosen.append(rng.choice(documents))
        size += len(encode(chosen[-1]))
    before = int(len(chosen) * _BEFORE_EDIT)
    head = "\n\n".join(["Context:", *chosen[:before], f"Alias of {name}: "])
    old_head, new_head = (list(encode(f"{frame.opening}{head}{key}\n")) for key in keys)
    rest = list(encode("\n" + "\n\n".join(chosen[before:])))
    tables, asked, season = _tables(rng, keys, values, form)
    old_answer, new_answer = (encode(value)[0] for value in values[2 * asked : 2 * asked + 2])
    if len(old_head) != len(new_head) or old_answer == new_answer or len(rest) <= distance:
        return None
    gap = rest[:distance] + list(encode("\n\n")) if distance else []
    pieces = [list(encode(table)) for table in tables]
    question = _QUESTIONS[form].format(name=name, season=season)
    query = list(encode(f"\n\nQuestion: {question}{frame.closing}"))
    body = gap + [token for piece in pieces for token in piece] + rest[distance:]
    start = len(old_head) + len(gap) + sum(map(len, pieces[:asked]))
    differ = [at for at, (a, b) in enumerate(zip(old_head, new_head, strict=True)) if a != b]
    return DerivedItem(
        form=form,
        distance=distance,
        old=(*old_head, *body, *query),
        new=(*new_head, *body, *query),
        edit=Run(differ[0], differ[-1] + 1),
        carrier=Run(start, start + len(pieces[asked])),
        query_start=len(old_head) + len(body),
        old_answer=old_answer,
        new_answer=new_answer,
    )


def _tables(rng: random.Random, keys: tuple[str, str], values: Sequence[str], form: Form) -> tuple[list[str], int, str]:
    """Returns the tables in their order, which of them is asked for, and its season; table i has the values 2i and 2i + 1."""

    def table(title: str, at: int) -> str:
        lines = [
            f"- {_DIGITS.get(key, key)}: {value}" for key, value in zip(keys, values[2 * at : 2 * at + 2], strict=True)
        ]
        return "\n".join([title, *lines, ""])

    if form != "competing":
        return [table("Lookup table:", 0)], 0, ""
    asked = rng.randrange(len(_SEASONS))
    return [table(f"Lookup table, {season}:", at) for at, season in enumerate(_SEASONS)], asked, _SEASONS[asked]


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
