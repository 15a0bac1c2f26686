"""A tokenizer for tests: words, spaces and marks."""

from __future__ import annotations

import re
from collections.abc import Sequence


class Words:
    """Whatever it encodes it gives back."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece, len(self.ids)) for piece in re.findall(r"\w+|\s|[^\w\s]", text)]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = list(self.ids)
        return "".join(pieces[i] for i in ids)
