"""Pairs of messages that stand in both versions: the first evidence of a diff."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence

from agentcache.errors import ConfigError
from agentcache.types import MessageSpan

__all__ = ["Anchors", "MessagePair", "check_anchors", "pair_messages"]

Anchors = tuple[Sequence[MessageSpan], Sequence[MessageSpan]]
MessagePair = tuple[MessageSpan, MessageSpan]
"""The same message, old and new."""


def check_anchors(spans: Sequence[MessageSpan], tokens: int, side: str) -> None:
    """Checks that message spans are ascending, disjoint and inside their sequence.

    Raises:
        ConfigError: They are not; names the span.
    """
    end = 0
    for span in spans:
        if not end <= span.start <= span.stop <= tokens:
            raise ConfigError(
                f"{side} anchors: span [{span.start}, {span.stop}) must start at or after {end} and end within the "
                f"{tokens} {side} tokens; pass the spans of the rendering that the ids come from"
            )
        end = span.stop


def pair_messages(old: Sequence[MessageSpan], new: Sequence[MessageSpan]) -> list[MessagePair]:
    """Returns the messages with equal content in both versions, ascending in the new one; each message is used once.

    Messages pair by (id, content hash) first, then by content hash alone; repeated ones pair in their order.
    """
    taken: dict[int, int] = {}
    old_keys, new_keys = ([(span.message_id, span.content_hash) for span in spans] for spans in (old, new))
    _pair(taken, old_keys, new_keys, [at for at, key in enumerate(new_keys) if key[0] is not None])
    old_texts, new_texts = [key[1] for key in old_keys], [key[1] for key in new_keys]
    _pair(taken, old_texts, new_texts, [at for at in range(len(new)) if at not in taken])
    return [(old[taken[j]], new[j]) for j in sorted(taken)]


def _pair(taken: dict[int, int], old: Sequence[Hashable], new: Sequence[Hashable], unpaired: Iterable[int]) -> None:
    """Adds the pairs of equal keys to `taken`, new to old: what is repeated pairs in its order."""
    used = set(taken.values())
    waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for i, key in enumerate(old):
        if i not in used:
            waiting[key].append(i)
    for j in unpaired:
        queue = waiting.get(new[j])
        if queue:
            taken[j] = queue.popleft()
