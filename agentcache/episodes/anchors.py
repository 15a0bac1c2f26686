"""Pairs of messages that stand in both versions: the first evidence of a diff."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence

from agentcache.errors import ConfigError
from agentcache.types import MessageSpan

__all__ = ["Anchors", "check_anchors", "pair_messages"]

Anchors = tuple[Sequence[MessageSpan], Sequence[MessageSpan]]


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


def pair_messages(old: Sequence[MessageSpan], new: Sequence[MessageSpan]) -> list[tuple[MessageSpan, MessageSpan]]:
    """Returns the messages with equal content in both versions, ascending in the new one; each message is used once.

    Messages pair by (id, content hash) first, then by content hash alone; repeated ones pair in their order.
    """
    taken: dict[int, int] = {}
    free = set(range(len(old)))
    for use_id in (True, False):
        waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for i in sorted(free):
            waiting[_key(old[i], use_id)].append(i)
        for j in _unpaired(new, taken, use_id):
            queue = waiting.get(_key(new[j], use_id))
            if queue:
                taken[j] = queue.popleft()
                free.discard(taken[j])
    return [(old[taken[j]], new[j]) for j in sorted(taken)]


def _key(span: MessageSpan, use_id: bool) -> Hashable:
    return (span.message_id, span.content_hash) if use_id else span.content_hash


def _unpaired(new: Sequence[MessageSpan], taken: dict[int, int], use_id: bool) -> Iterable[int]:
    return [j for j, span in enumerate(new) if j not in taken and (span.message_id is not None or not use_id)]
