"""Replies as the model wrote them, so that their very tokens can stand in later prompts."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from agentcache.episodes.messages import canonical
from agentcache.episodes.pieces import ChatTokenizer, TokenArray

__all__ = ["Replies", "Reply"]

_CACHED = 4096
_OBJECTS = 256  # JSON objects that are looked for in one reply


@dataclass(frozen=True, slots=True)
class Reply:
    """One generation without the special tokens that ended it.

    Attributes:
        text: What it decodes to.
        ids: Its tokens.
        arguments: JSON objects in it by `canonical` form, in the order written.
    """

    text: str
    ids: TokenArray
    arguments: dict[str, dict[str, Any]]


class Replies:
    """Decodes generations, each once. Thread-safe."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = frozenset([*tokenizer.all_special_ids, *(i for i, token in added if token.special)])
        self._cache: OrderedDict[bytes, Reply] = OrderedDict()
        self._lock = Lock()

    def decode(self, generated: Iterable[Sequence[int] | TokenArray]) -> list[Reply]:
        """Returns the replies that generated ids are; empty ones are left out."""
        with self._lock:
            replies = [self._reply(np.asarray(ids, np.int32)) for ids in generated]
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return [reply for reply in replies if reply.text]

    def _reply(self, ids: TokenArray) -> Reply:
        key = ids.tobytes()
        reply = self._cache.get(key)
        if reply is None:
            words = ids.tolist()
            while words and words[-1] in self._special:
                words.pop()
            text = self._tokenizer.decode(words, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            reply = self._cache[key] = Reply(str(text), ids[: len(words)].copy(), _objects(str(text)))
        self._cache.move_to_end(key)
        return reply


def _objects(text: str) -> dict[str, dict[str, Any]]:
    """Returns the JSON objects in a text, and those directly inside them, by canonical form."""
    found: dict[str, dict[str, Any]] = {}
    decoder = json.JSONDecoder()
    at = text.find("{")
    for _ in range(_OBJECTS):
        if at < 0:
            break
        try:
            value, stop = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, stop = {}, at + 1
        for item in (value, *value.values()):
            if item and isinstance(item, dict):
                found[canonical(item)] = item
        at = text.find("{", stop)
    return found
