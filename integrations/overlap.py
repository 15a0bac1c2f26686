"""How much two prompts have in common, message by message, without rendering them."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

__all__ = ["Fingerprint", "Overlap", "fingerprint", "overlap"]

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


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A prompt's messages as hashes of their content. Messages are changed in place and keep their ids, so neither will do.

    Attributes:
        keys: A hash a message, of this process.
        sizes: Characters a message; negative for a system message.
    """

    keys: array[int]
    sizes: array[int]

    @property
    def said(self) -> int:
        """Characters of all messages but system messages."""
        return sum(size for size in self.sizes if size > 0)

    def then(self, message: BaseMessage) -> Fingerprint:
        """Returns the fingerprint of the prompt with one more message."""
        more = fingerprint([message])
        return Fingerprint(self.keys + more.keys, self.sizes + more.sizes)


def fingerprint(messages: Iterable[BaseMessage]) -> Fingerprint:
    """Returns a prompt's fingerprint."""
    keys, sizes = array("q"), array("q")
    for message in messages:
        content = _text(message.content)
        calls = _text(message.tool_calls) if isinstance(message, AIMessage) and message.tool_calls else ""
        answers = message.tool_call_id if isinstance(message, ToolMessage) else None
        keys.append(hash((message.type, content, calls, answers)))
        size = len(content) + len(calls) + _OVERHEAD
        sizes.append(-size if message.type == "system" else size)
    return Fingerprint(keys, sizes)


def overlap(old: Fingerprint, new: Fingerprint) -> Overlap:
    """Returns what a new prompt has of an old one."""
    same = 0
    for mine, other in zip(old.keys, new.keys, strict=False):
        if mine != other:
            break
        same += 1
    prefix = _total(old.sizes[:same])
    if same == len(old.keys):
        return Overlap(prefix, prefix, sum(size for size in old.sizes if size > 0), True)
    left = Counter(new.keys[same:])
    common, said = prefix, sum(size for size in old.sizes[:same] if size > 0)
    for key, size in zip(old.keys[same:], old.sizes[same:], strict=True):
        if left[key]:
            left[key] -= 1
            common += abs(size)
            said += max(size, 0)
    return Overlap(prefix, common, said, False)


def _total(sizes: Sequence[int]) -> int:
    return sum(abs(size) for size in sizes)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
