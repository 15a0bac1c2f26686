"""Why a version differs from its parent: read off the messages, or off the diff's shape when there are only ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

from agentcache.episodes.anchors import MessagePair, pair_messages
from agentcache.episodes.grams import heaviest_chain
from agentcache.types import AlignedRun, Boundary, BoundaryKind, MessageSpan, PromptDiff, RevisionKind

__all__ = ["classify"]

# Bare token ids: a passage that shrank to a quarter, and by this many tokens, reads as a summary.
_SUMMARY_RATIO = 4
_SUMMARY_TOKENS = 128


def classify(
    diff: PromptDiff,
    old_prompt: int,
    old_spans: Sequence[MessageSpan] = (),
    new_spans: Sequence[MessageSpan] = (),
    boundaries: Sequence[Boundary] = (),
    pairs: Sequence[MessagePair] | None = None,
) -> RevisionKind:
    """Returns why the new prompt differs from its parent.

    Args:
        diff: From the parent, as computed (prompt and reply), to the new prompt.
        old_prompt: Tokens of the parent's prompt.
        old_spans: The parent's messages; empty when it came as bare ids.
        new_spans: The new prompt's messages.
        boundaries: Of the new prompt: which of its messages hold documents.
        pairs: Of the spans, where `pair_messages` has paired them already.
    """
    if diff.prefix == diff.new_len == old_prompt:
        return RevisionKind.IDENTICAL
    if diff.is_append:
        return RevisionKind.APPEND
    if old_spans and new_spans:
        return _by_messages(diff, old_spans, new_spans, boundaries, pairs)
    return _by_shape(diff, old_prompt)


def _by_messages(
    diff: PromptDiff,
    old: Sequence[MessageSpan],
    new: Sequence[MessageSpan],
    boundaries: Sequence[Boundary],
    pairs: Sequence[MessagePair] | None,
) -> RevisionKind:
    removed, added, turn = _changes(old, new, pair_messages(old, new) if pairs is None else pairs)
    if any("summar" in tag.lower() for span in added for tag in span.tags):
        return RevisionKind.SUMMARISATION
    if not removed and not added:
        return _unchanged(diff, old, turn)
    if len(removed) > 1 and len(added) == 1 and added[0].message_id not in _ids(removed):
        return RevisionKind.SUMMARISATION
    if not added:
        return RevisionKind.TRUNCATION
    roles = {span.role for span in added}
    if roles == {"tool"} == {span.role for span in removed}:
        return RevisionKind.TOOL_RESULT
    memory = any("memory" in tag.lower() for span in added for tag in span.tags)
    if memory or "system" in roles or diff.moved or any(_has_documents(span, boundaries) for span in added):
        return RevisionKind.MEMORY
    return RevisionKind.OTHER


def _unchanged(diff: PromptDiff, old: Sequence[MessageSpan], turn: Sequence[MessageSpan]) -> RevisionKind:
    """Returns the kind when every message was kept: the order, the new turn or the template made the difference."""
    if not turn and diff.new_len < diff.old_len and diff.prefix == diff.new_len:
        return RevisionKind.TRUNCATION
    if diff.prefix < next((span.start for span in old if span.role != "system"), 0):
        return RevisionKind.MEMORY  # tools, or what else the template writes into the system block, were exchanged
    reply_again = bool(turn) and turn[0].role == "assistant"
    if diff.prefix >= old[-1].stop and not reply_again:
        return RevisionKind.APPEND  # the reply was not kept, all else was
    return RevisionKind.MEMORY if diff.moved else RevisionKind.RETOKENISATION


def _changes(
    old: Sequence[MessageSpan], new: Sequence[MessageSpan], pairs: Sequence[MessagePair]
) -> tuple[list[MessageSpan], list[MessageSpan], list[MessageSpan]]:
    """Returns the messages that went, those that came among the kept ones, and the new turn after them.

    What stands in the place of a message that went is no new turn: it is the first that has its id (models call tools by an id
    that they have used before), or it has its role at the end of the old prompt.
    """
    old_kept, new_kept = _kept(old, new, pairs)
    removed = [span for span, stays in zip(old, old_kept, strict=True) if not stays]
    gone = _ids(removed)
    places = {
        span.message_id: i for i, span in reversed([*enumerate(new)]) if span.message_id in gone and not new_kept[i]
    }
    ends = {*places.values(), *(i for i, stays in enumerate(new_kept) if stays)}
    turn = sum(1 for _ in takewhile(lambda i: i not in ends, reversed(range(len(new)))))
    tail = sum(1 for _ in takewhile(lambda stays: not stays, reversed(old_kept)))
    at = len(new) - turn
    ends_of_both = zip(old[len(old) - tail :], new[at:], strict=False)
    at += sum(1 for _ in takewhile(lambda pair: pair[0].role == pair[1].role, ends_of_both))
    added = [span for span, stays in zip(new[:at], new_kept, strict=False) if not stays]
    return removed, added, list(new[at:])


def _kept(
    old: Sequence[MessageSpan], new: Sequence[MessageSpan], pairs: Sequence[MessagePair]
) -> tuple[list[bool], list[bool]]:
    """Returns which old and which new messages are the same, in the same order."""
    chain = heaviest_chain([a.start for a, _ in pairs], [max(b.stop - b.start, 1) for _, b in pairs])
    old_starts, new_starts = {pairs[i][0].start for i in chain}, {pairs[i][1].start for i in chain}
    return [span.start in old_starts for span in old], [span.start in new_starts for span in new]


def _ids(spans: Sequence[MessageSpan]) -> set[str]:
    return {span.message_id for span in spans if span.message_id is not None}


def _has_documents(span: MessageSpan, boundaries: Sequence[Boundary]) -> bool:
    return span.role == "user" and any(
        b.kind is BoundaryKind.DOCUMENT and span.start <= b.start < span.stop for b in boundaries
    )


def _by_shape(diff: PromptDiff, old_prompt: int) -> RevisionKind:
    if diff.prefix >= old_prompt:
        return RevisionKind.APPEND
    if diff.moved:
        return RevisionKind.MEMORY
    edges = [AlignedRun(0, 0, 0), *diff.aligned]
    if not diff.suffix:
        return RevisionKind.TRUNCATION if diff.prefix == diff.new_len else RevisionKind.OTHER
    gaps = [(b.old_start - a.old_stop, b.new_start - a.new_stop) for a, b in pairwise(edges)]
    changed = [gap for gap in gaps if gap != (0, 0)]
    if all(came == 0 for _, came in changed):
        return RevisionKind.TRUNCATION
    if all(went >= _SUMMARY_RATIO * came and went - came >= _SUMMARY_TOKENS for went, came in changed):
        return RevisionKind.SUMMARISATION
    return RevisionKind.OTHER
