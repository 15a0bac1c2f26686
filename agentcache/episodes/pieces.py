"""Tokenisation piece by piece: exact, cached, and with token positions of characters."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from agentcache.errors import RenderError

__all__ = ["ChatTokenizer", "Layout", "PieceTokenizer", "TokenArray"]

TokenArray = npt.NDArray[np.int32]
_CACHE_CHARACTERS = 16 << 20
_PROBE = "Hello  wörld:\n\n{} user \n{}\nIt's 12 {}  x{}"


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer (a fast one: it must know character offsets)."""

    is_fast: bool
    all_special_ids: Sequence[int]
    added_tokens_decoder: Mapping[int, Any]
    eos_token: str | None
    chat_template: Any

    def __call__(self, text: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Returns `input_ids` (and `offset_mapping`) of a list of texts."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Returns the text of ids."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Returns the rendered conversation."""


class PieceTokenizer:
    """Tokenises text that is cut before special tokens; each piece once.

    A fast tokenizer takes added tokens out of the text first and tokenises what lies between them on its own, so pieces
    that begin with one tokenise as they do in the whole. This is checked on a probe; where it does not hold text is
    never cut. Tokens that swallow whitespace before them are no place to cut.

    Args:
        tokenizer: A fast tokenizer.
        samples: Texts that its template rendered: they show tokens which the template puts together from parts.

    Attributes:
        specials: Pattern of the special tokens that the template writes, or None.
    """

    def __init__(self, tokenizer: ChatTokenizer, samples: Iterable[str]) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise RenderError(
                f"{type(tokenizer).__name__} is no fast tokenizer, so characters cannot be traced to tokens; "
                "load it with transformers.AutoTokenizer and a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._cache: OrderedDict[str, list[npt.NDArray[np.int32] | None]] = OrderedDict()
        self._cached_characters = 0
        added = _template_tokens(tokenizer, samples)
        self.specials = _alternation(t.content for t in added if t.special)
        hard = [t.content for t in added if not (t.lstrip or t.single_word or t.normalized)]
        self._cut = _alternation(hard)
        if self._cut and not self._is_exact(hard):
            self._cut = None

    def split(self, text: str, whole: Sequence[tuple[int, int]] = ()) -> list[tuple[int, str]]:
        """Returns the pieces of text with their first characters: cut before hard tokens, and around `whole` spans."""
        cuts = [m.start() for m in self._cut.finditer(text)] if self._cut else []
        for start, stop in whole:
            cuts[bisect_left(cuts, start) : bisect_right(cuts, stop)] = [start, stop]
        edges = sorted({0, len(text), *cuts})
        return [(a, text[a:b]) for a, b in pairwise(edges)]

    def can_cut(self, text: str, at: int) -> bool:
        """Whether what follows a position tokenises there as it does in the whole text."""
        return at == len(text) or (self._cut is not None and self._cut.match(text, at) is not None)

    def ids(self, pieces: Sequence[str]) -> list[TokenArray]:
        """Returns the token ids of each piece."""
        with self._lock:
            missing = [piece for piece in dict.fromkeys(pieces) if piece not in self._cache]
            if missing:
                for piece, ids in zip(missing, self._encode(missing)["input_ids"], strict=True):
                    self._cache[piece] = [np.array(ids, np.int32), None]
                    self._cached_characters += len(piece)
            found = []
            for piece in pieces:
                self._cache.move_to_end(piece)
                found.append(self._cache[piece][0])
            while self._cached_characters > _CACHE_CHARACTERS and len(self._cache) > 1:
                self._cached_characters -= len(self._cache.popitem(last=False)[0])
        return [ids for ids in found if ids is not None]

    def token_starts(self, piece: str) -> TokenArray:
        """Returns the first character of each token of a piece."""
        with self._lock:
            entry = self._cache.get(piece)
            if entry is None or entry[1] is None:
                offsets = self._encode([piece], return_offsets_mapping=True)["offset_mapping"][0]
                starts = np.fromiter((start for start, _ in offsets), np.int32, len(offsets))
                if entry is None:
                    return starts
                entry[1] = starts
            starts_known = entry[1]
            assert starts_known is not None
            return starts_known

    def _encode(self, texts: list[str], **kwargs: Any) -> Mapping[str, Any]:
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **kwargs)

    def _is_exact(self, hard: list[str]) -> bool:
        probe = "".join(_PROBE.format(*[token] * 4) for token in hard)
        whole, *parts = self._encode([probe, *(part for _, part in self.split(probe))])["input_ids"]
        return list(whole) == [token for part in parts for token in part]


class Layout:
    """Where characters of a rendered text are in its tokens.

    Args:
        tokenizer: Knows the offsets inside a piece.
        pieces: The text, in pieces with their first characters.
        ids: The tokens of each piece.
        spliced: First characters of pieces whose tokens are not the tokenizer's: nothing inside them has a position.
    """

    def __init__(
        self,
        tokenizer: PieceTokenizer,
        pieces: Sequence[tuple[int, str]],
        ids: Sequence[TokenArray],
        spliced: Container[int] = (),
    ) -> None:
        self._tokenizer, self._pieces, self._spliced = tokenizer, pieces, spliced
        self._characters = [start for start, _ in pieces]
        self._tokens = [0, *accumulate(len(part) for part in ids)]

    def token_at(self, character: int) -> int:
        """Returns the first token that starts at a character or after it: a token that straddles it stays before."""
        index = bisect_right(self._characters, character) - 1
        if index < 0:
            return 0
        start, piece = self._pieces[index]
        if character == start:
            return self._tokens[index]
        if character >= start + len(piece) or start in self._spliced:
            return self._tokens[index + 1]
        inside = np.searchsorted(self._tokenizer.token_starts(piece), character - start)
        return self._tokens[index] + int(inside)


def _template_tokens(tokenizer: ChatTokenizer, samples: Iterable[str]) -> list[Any]:
    """Returns the added tokens that the chat template writes, and the end of text: others need no cut."""
    templates = tokenizer.chat_template
    templates = templates.values() if isinstance(templates, dict) else [templates or ""]
    seen = "\n".join([*templates, *samples, tokenizer.eos_token or ""])
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.content]
    # A token inside a longer one is no place to cut: the tokenizer takes the longer one.
    inner = {a.content for a in added for b in added if a.content != b.content and a.content in b.content}
    return [token for token in added if token.content in seen and token.content not in inner]


def _alternation(tokens: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(set(tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
