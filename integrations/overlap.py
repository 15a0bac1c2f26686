"""How much two prompts have in common, message by message, without rendering them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

__all__ = ["Fingerprint", "Overlap", "fingerprint", "overlap"]

_ENCODER = json.JSONEncoder(sort_keys=True, default=str)  # `json.dumps` makes one a call
_OVERHEAD = 16  # characters that a template writes around a message


class Overlap(NamedTuple):
    """What a new prompt has of an old one, in characters.

    Attributes:
        prefix: The messages at the beginning.
        common: All messages, wherever they stand.
        said: Of those, the ones that are no system message.
        is_append: Whether the whole old prompt begins the new one.
    """

    prefix: int
    common: int
    said: int
    is_append: bool

    @property
    def score(self) -> int:
        """What the choice of a parent goes by: a prefix counts twice, since the exact policy reuses nothing else."""
        return self.prefix + self.common


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """A prompt's messages as hashes of their content. Messages are changed in place and keep their ids, so neither will do.

    Attributes:
        keys: A hash a message, of this process; int64.
        sizes: Characters a message; negative for a system message; int64.
    """

    keys: np.ndarray
    sizes: np.ndarray

    @cached_property
    def members(self) -> frozenset[int]:
        """The keys."""
        return frozenset(self.keys.tolist())

    @property
    def said(self) -> int:
        """Characters of all messages but system messages."""
        return _said(self.sizes)

    def then(self, message: BaseMessage) -> Fingerprint:
        """Returns the fingerprint of the prompt with one more message."""
        more = fingerprint([message])
        return Fingerprint(np.concatenate([self.keys, more.keys]), np.concatenate([self.sizes, more.sizes]))


def fingerprint(messages: Iterable[BaseMessage]) -> Fingerprint:
    """Returns a prompt's fingerprint."""
    keys: list[int] = []
    sizes: list[int] = []
    for message in messages:
        content = _text(message.content)
        calls = _text(message.tool_calls) if isinstance(message, AIMessage) and message.tool_calls else ""
        answers = message.tool_call_id if isinstance(message, ToolMessage) else None
        keys.append(hash((message.type, content, calls, answers)))
        size = len(content) + len(calls) + _OVERHEAD
        sizes.append(-size if message.type == "system" else size)
    return Fingerprint(np.array(keys, np.int64), np.array(sizes, np.int64))


def overlap(old: Fingerprint, new: Fingerprint) -> Overlap:
    """Returns what a new prompt has of an old one; a message that stands there once counts as often as the old one has it."""
    shared = min(len(old.keys), len(new.keys))
    differs = np.flatnonzero(old.keys[:shared] != new.keys[:shared])
    same = int(differs[0]) if differs.size else shared
    prefix = int(np.abs(old.sizes[:same]).sum())
    behind = zip(old.keys[same:].tolist(), old.sizes[same:].tolist(), strict=True)
    rest = [size for key, size in behind if key in new.members]
    said = _said(old.sizes[:same]) + sum(size for size in rest if size > 0)
    return Overlap(prefix, prefix + sum(map(abs, rest)), said, same == len(old.keys))


def _said(sizes: np.ndarray) -> int:
    return int(sizes[sizes > 0].sum())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _ENCODER.encode(value)
