"""Replies as the model wrote them, so that their very tokens can stand in later prompts."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from agentcache.episodes.messages import canonical
from agentcache.episodes.pieces import ChatTokenizer, TokenArray

__all__ = ["Replies", "Reply", "WrittenOrder"]

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


class WrittenOrder:
    """Puts arguments in the order in which the model wrote them, where a reply shows it; sorts them elsewhere.

    A reply in JSON holds the very object. One in another notation (GLM, Qwen3.5) shows the order by where the names
    stand.
    """

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._texts = [reply.text for reply in replies]
        self._naming: dict[str, list[tuple[str, int]]] = {}
        self._objects = {form: value for reply in replies for form, value in reply.arguments.items()}

    def __call__(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a function in their order."""
        known = self._objects.get(canonical(arguments)) if self._objects else None
        if known is not None:
            return known
        words = [value for value in arguments.values() if isinstance(value, str)]
        for text, stop in self._behind(name) if len(arguments) > 1 else ():
            if all(word in text for word in words):
                places = {key: _find_word(text, key, stop) for key in arguments}
                if min(places.values()) >= 0:
                    return {key: self._value(arguments[key]) for key in sorted(places, key=places.__getitem__)}
        return {key: self._value(arguments[key]) for key in sorted(arguments)}

    def _behind(self, name: str) -> list[tuple[str, int]]:
        """Returns the replies that hold a name, and where it ends in them."""
        if name not in self._naming:
            found = ((text, text.find(name)) for text in self._texts)
            self._naming[name] = [(text, start + len(name)) for text, start in found if start >= 0]
        return self._naming[name]

    def _value(self, value: Any) -> Any:
        if value is None or isinstance(value, str | bool | int):  # as JSON gives them back
            return value
        return self._objects.get(form := canonical(value)) or json.loads(form)


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


def _find_word(text: str, word: str, start: int) -> int:
    found = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)").search(text, start)
    return found.start() if found else -1


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
