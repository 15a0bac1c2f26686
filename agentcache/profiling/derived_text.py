"""The words of derived items: the line that is edited, what stands behind it, and the question. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["FORMS", "Form", "Piece", "Script", "write_script"]

Form = Literal["direct", "table", "indirect", "competing", "paraphrase", "chain", "two_edits", "length"]
FORMS: tuple[Form, ...] = get_args(Form)
"""`direct`: the edited line states the answer; there is no table. `table`: the question names the alias and the table. `indirect`:
it names neither, so that no word of it stands in the carrier. `competing`: three tables have the same keys and the question is
about one of them. `paraphrase`: the table has digits where the alias has the words for them, so that no token of the edit stands
in the carrier. `chain`: the key is itself an alias of the table's key, half way. `two_edits`: the alias of another name is edited
too, half way. `length`: the new key has another number of tokens than the old one."""

_NAMES = ("Orlan", "Vestri", "Kalmar", "Tibor", "Nerida", "Jovane", "Quill", "Marek", "Sorrel", "Ivarra")
_KEYS = (("Alpha", "Beta"), ("Red", "Blue"), ("North", "South"), ("Gamma", "Delta"), ("East", "West"))
_CODES = (("Circle", "Square"), ("Lion", "Tiger"), ("Monday", "Friday"))
_LONG = (("Alpha", "Beta Prime"), ("Red", "Dark Blue"), ("North", "Far South"), ("Delta", "Gamma Minor"))
_NUMBERS = (("one", "two"), ("three", "seven"), ("five", "nine"))
_DIGITS = {"one": "1", "two": "2", "three": "3", "five": "5", "seven": "7", "nine": "9"}
_VALUES = ("copper", "salt", "timber", "wool", "grain", "glass", "silver", "coal")
_SEASONS = ("spring", "summer", "winter")
_QUESTIONS: dict[Form, str] = {
    "indirect": "Which material belongs to {name}?",
    "competing": "What is the {season} lookup table value for the alias of {name}?",
    "chain": "What is the lookup table value for the code of the alias of {name}?",
}
_QUESTION = "What is the lookup table value for the alias of {name}?"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text behind the edited line.

    Attributes:
        place: Share of the item's distance that stands between that line and this text.
        old: The text before the edit.
        new: And after it.
        carrier: Whether the answer stands here.
    """

    place: float
    old: str
    new: str
    carrier: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """What one item says.

    Attributes:
        head: The edited line before and after the edit.
        pieces: Behind it, ascending by place.
        question: About the value.
        values: The answer before and after the edit.
        words: That no other text of the prompt may hold.
    """

    head: tuple[str, str]
    pieces: tuple[Piece, ...]
    question: str
    values: tuple[str, str]
    words: tuple[str, ...]


def write_script(rng: random.Random, form: Form) -> Script:
    """Returns the words of an item; equal states of `rng` give every form the same name and values."""
    name, other = rng.sample(_NAMES, 2)
    values = rng.sample(_VALUES, len(_VALUES))
    direction = rng.choice((1, -1))
    keys = rng.choice({"paraphrase": _NUMBERS, "length": _LONG}.get(form, _KEYS))[::direction]
    seasons = rng.sample(_SEASONS, len(_SEASONS))
    codes = rng.choice(_CODES)
    question = _QUESTIONS.get(form, _QUESTION).format(name=name, season=seasons[0])
    words = (name, *keys, *values[:2])
    if form == "direct":
        first, second = (f"Lookup table value for the alias of {name}: {value}\n" for value in values[:2])
        return Script((first, second), (), question, (values[0], values[1]), words)
    first, second = (f"Alias of {name}: {key}\n" for key in keys)
    table_keys: Sequence[str] = [_DIGITS.get(key, key) for key in keys]
    pieces: list[Piece] = []
    if form == "chain":
        link = "".join(f"Code of {key}: {code}\n" for key, code in sorted(zip(keys, codes, strict=True)))
        pieces.append(Piece(0.5, link, link))
        table_keys, words = codes, (*words, *codes)
    if form == "two_edits":
        was, becomes = (f"Alias of {other}: {key}\n" for key in keys[::-1])
        pieces.append(Piece(0.5, was, becomes))
        words = (*words, other)
    if form == "competing":
        tables = [(season, values[2 * at : 2 * at + 2]) for at, season in enumerate(seasons)]
        rng.shuffle(tables)
        words = (*words, *values[2:6])
        for season, held in tables:
            text = _table(f"Lookup table, {season}:", table_keys, held, rng)
            pieces.append(Piece(1.0, text, text, carrier=season == seasons[0]))
    else:
        text = _table("Lookup table:", table_keys, values[:2], rng)
        pieces.append(Piece(1.0, text, text, carrier=True))
    return Script((first, second), tuple(pieces), question, (values[0], values[1]), words)


def _table(title: str, keys: Sequence[str], values: Sequence[str], rng: random.Random) -> str:
    """Returns a table whose two rows stand in any order."""
    rows = [f"- {key}: {value}" for key, value in zip(keys, values, strict=True)]
    rng.shuffle(rows)
    return "\n".join([title, *rows, ""])
