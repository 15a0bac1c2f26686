"""The diff of two token sequences: exact prefix, aligned suffix in any number of runs, moved spans.

```
old   [ P ][ M ][ S1 ][ deleted ][ S2 ]              trim      P, and the common suffix when there is one
new   [ P ][ X   ][ S1 ][ S2 ][ X ][ moved ][ N ]    messages  equal messages: heaviest chain, then the moved ones
                                                     long      k-grams of `min_move` tokens, heaviest chain, gap by gap
                                                     moved     the same k-grams in what is left, in any order
                                                     short     k-grams of `min_run` tokens, heaviest chain, gap by gap
```
Each step takes candidates longest first, keeps the part whose tokens are really equal and not taken yet on either
side, and grows it as far as they are: a hash only proposes. Grams that occur once on either side of a gap pair first
(patience diff); where there are none, the r-th occurrences pair, so repeated text aligns too. The steps are bounded:
O(T log T) on any input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from agentcache.episodes.anchors import Anchors, MessagePair, check_anchors, pair_messages
from agentcache.episodes.grams import GramRuns, Ints, Side, gram_hashes, heaviest_chain, match_grams
from agentcache.errors import ConfigError
from agentcache.types import AlignedRun, PromptDiff, Run, merge_runs

__all__ = ["MIN_MOVE", "MIN_RUN", "MIN_SPAN", "TokenIds", "as_ids", "common_prefix", "diff_tokens", "find_spans"]

MIN_RUN = 8
"""Aligned runs after the prefix that are shorter are confetti: recomputing them costs less than tracking them."""
MIN_MOVE = 32
"""Spans that stand in another order are reused from this length on."""
MIN_SPAN = 16
"""Spans of other sources than the parent are reused from this length on: what comes first in them is often recomputed."""

# Bounds that only adversarial input meets: rounds a step, and candidates that are tried a round and in all.
_ROUNDS = 24
_ROUND_CANDIDATES = 16_384
_CANDIDATES = 32_768

TokenIds = Sequence[int] | npt.NDArray[np.integer]


def diff_tokens(
    old_ids: TokenIds,
    new_ids: TokenIds,
    *,
    anchors: Anchors | None = None,
    min_run: int = MIN_RUN,
    min_move: int = MIN_MOVE,
    pairs: Sequence[MessagePair] | None = None,
) -> PromptDiff:
    """Returns the aligned spans between two token sequences; each old and each new token lies in one span at most.

    The prefix is the longest common one; the suffix is the longest common one of the rest, from `min_run` tokens on.

    Args:
        old_ids: Ids whose KV exists, in order.
        new_ids: Ids of the new prompt.
        anchors: Message spans of the old and of the new ids. Equal messages align first, and a common suffix counts
            from `min_run` tokens before the new generation prompt on: that alone ends every prompt.
        min_run: Fewest tokens of an aligned run after the prefix.
        min_move: Fewest tokens of a span that is found in another order.
        pairs: Of the anchors, where `pair_messages` has paired them already.

    Raises:
        ConfigError: An argument is not allowed.
    """
    if not 1 <= min_run <= min_move:
        raise ConfigError(f"min_run={min_run}, min_move={min_move}: need 1 <= min_run <= min_move")
    old, new = as_ids(old_ids), as_ids(new_ids)
    tail = 0  # the generation prompt
    if anchors is not None:
        check_anchors(anchors[0], len(old), "old")
        check_anchors(anchors[1], len(new), "new")
        tail = len(new) - anchors[1][-1].stop if anchors[1] else 0
    prefix = common_prefix(old, new)
    suffix = common_prefix(old[prefix:][::-1], new[prefix:][::-1])
    if suffix < min_run + tail:
        suffix = 0
    runs = [AlignedRun(0, 0, prefix)] if prefix else []
    old_stop, new_stop = len(old) - suffix, len(new) - suffix
    if prefix + min_run <= min(old_stop, new_stop):
        middle = _Middle(old[prefix:old_stop], new[prefix:new_stop], min_run, min_move)
        if pairs is None:
            pairs = pair_messages(*anchors) if anchors else ()
        middle.align(_message_runs(pairs, old, new, prefix, old_stop, new_stop))
        runs += [AlignedRun(o + prefix, n + prefix, length) for o, n, length in middle.runs()]
    if suffix:
        runs.append(AlignedRun(old_stop, new_stop, suffix))
    return PromptDiff(len(old), len(new), tuple(runs))


def find_spans(
    source_ids: TokenIds, new_ids: TokenIds, fresh: Iterable[tuple[int, int]], *, min_span: int = MIN_SPAN
) -> tuple[AlignedRun, ...]:
    """Returns where spans of a prompt stand in other ids, ascending and disjoint in the prompt.

    Source tokens may be found in any order, and several times.

    Args:
        source_ids: Ids whose KV exists.
        new_ids: Ids of the prompt.
        fresh: The runs of the prompt to search.
        min_span: Fewest tokens of a span.

    Raises:
        ConfigError: An argument is not allowed.
    """
    if min_span < 1:
        raise ConfigError(f"min_span={min_span}: a span has a token at least")
    runs = [run for run in merge_runs(fresh) if run.stop - run.start >= min_span]
    if not runs or not len(source_ids):
        return ()
    first = runs[0].start
    middle = _Middle(as_ids(source_ids), as_ids(new_ids)[first : runs[-1].stop], min_span, min_span)
    middle.search([Run(start - first, stop - first) for start, stop in runs])
    return tuple(AlignedRun(o, n + first, length) for o, n, length in middle.runs())


def as_ids(ids: TokenIds) -> Ints:
    """Returns token ids as a flat int64 array; a copy unless they are one already.

    Raises:
        ConfigError: They are not a flat sequence of integers.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"token ids must be a flat sequence of integers, got shape {array.shape} of {array.dtype}; "
            "tokenize the prompt first"
        )
    return array.astype(np.int64, copy=False)


def common_prefix(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> int:
    """Returns how many leading elements of two arrays are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    at = int(differs.argmax()) if n else 0
    return at if n and differs[at] else n


def _message_runs(
    pairs: Iterable[MessagePair], old: Ints, new: Ints, prefix: int, old_stop: int, new_stop: int
) -> list[tuple[int, int, int]]:
    """Returns the equal tokens of paired messages inside the middle, relative to it, as (old, new, length).

    Neighbours that stay neighbours are one run: a long history is looked at once, not message by message.
    """
    joined: list[list[int]] = []
    for a, b in pairs:
        skip = max(prefix - a.start, prefix - b.start, 0)
        length = min(min(a.stop, old_stop) - a.start, min(b.stop, new_stop) - b.start) - skip
        if length <= 0:
            continue
        o, n = a.start + skip, b.start + skip
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (o, n):
            joined[-1][2] += length
        else:
            joined.append([o, n, length])
    return [
        (o + start - prefix, n + start - prefix, stop - start)
        for o, n, length in joined
        for start, stop in _stretches(old[o : o + length] == new[n : n + length])
    ]


class _Middle:
    """Aligns what lies between the common prefix and the common suffix.

    Invariant: `_free_old`/`_free_new` are False exactly where a run of `_chain` or `_moved` lies, and the runs of
    `_chain` ascend on both sides (growth stops at taken tokens, so no run ever passes another). `search` differs: old
    tokens stay free, and new ones that are not to be searched are not.
    """

    def __init__(self, old: Ints, new: Ints, min_run: int, min_move: int) -> None:
        self._old, self._new = old, new
        self._min_run, self._min_move = min_run, min_move
        self._free_old = np.ones(len(old), np.bool_)
        self._free_new = np.ones(len(new), np.bool_)
        self._chain: list[tuple[int, int, int]] = []
        self._moved: list[tuple[int, int, int]] = []
        self._candidates_left = _CANDIDATES
        self._used_once = True

    def align(self, messages: list[tuple[int, int, int]]) -> None:
        """Finds all runs; messages are (old, new, length), ascending in the new sequence."""
        in_order = heaviest_chain([m[0] for m in messages], [m[2] for m in messages])
        self._chain += self._take([messages[i] for i in in_order], self._min_run)
        self._moved += self._take(messages, self._min_move)
        self._rounds(self._min_move, in_order=True)
        self._rounds(self._min_move, in_order=False)
        if self._min_run < self._min_move:
            self._rounds(self._min_run, in_order=True)

    def search(self, fresh: Iterable[Run]) -> None:
        """Finds runs of `min_move` and more fresh tokens anywhere in the old ids."""
        self._used_once = False
        self._free_new[:] = False
        for start, stop in fresh:
            self._free_new[start:stop] = True
        self._rounds(self._min_move, in_order=False)

    def runs(self) -> list[tuple[int, int, int]]:
        """Returns all runs, ascending in the new sequence."""
        return sorted(self._chain + self._moved, key=lambda run: run[1])

    def _rounds(self, k: int, *, in_order: bool) -> None:
        """Takes matching runs of k and more tokens until none is left: unique grams first, then by occurrence."""
        grams = _free_grams(self._old, self._free_old, k), _free_grams(self._new, self._free_new, k)
        kept = self._chain if in_order else self._moved
        unique, sides = True, None
        for _ in range(_ROUNDS):
            if not (len(grams[0][0]) and len(grams[1][0])):
                return
            sides = sides or (
                self._side(*grams[0], 0 if in_order else None),
                self._side(*grams[1], 1 if in_order else None),
            )
            found = match_grams(*sides, unique=unique)
            taken = self._take(self._candidates(found, k, in_order=in_order), k)
            kept += taken
            if not taken and not unique:
                return
            unique = bool(taken)
            if taken:
                grams = _still_free(*grams[0], self._free_old, k), _still_free(*grams[1], self._free_new, k)
                sides = None

    def _side(self, starts: Ints, hashes: npt.NDArray[np.uint64], side: int | None) -> Side:
        """Returns grams with their gaps: old (0) or new (1) starts of the chain part them, None: one gap."""
        if side is None:
            gaps = np.zeros(len(starts), np.int64)
        else:
            gaps = np.searchsorted(np.array(sorted(run[side] for run in self._chain), np.int64), starts)
        return Side(starts, hashes, gaps)

    def _candidates(self, found: GramRuns, k: int, *, in_order: bool) -> Iterable[tuple[int, int, int]]:
        """Returns gram runs as token runs: the heaviest chain of them, or all."""
        old, new, count = found
        if len(count) > _ROUND_CANDIDATES:
            longest = np.sort(np.argpartition(count, -_ROUND_CANDIDATES)[-_ROUND_CANDIDATES:])
            old, new, count = old[longest], new[longest], count[longest]
        if in_order and (np.diff(old) <= 0).any():
            chain = heaviest_chain(old.tolist(), count.tolist())
            old, new, count = old[chain], new[chain], count[chain]
        return zip(old.tolist(), new.tolist(), (count + (k - 1)).tolist(), strict=True)

    def _take(self, candidates: Iterable[tuple[int, int, int]], least: int) -> list[tuple[int, int, int]]:
        """Returns the runs of `least` tokens and more that candidates yield, longest first, and marks them as taken."""
        taken = []
        for o, n, length in sorted(candidates, key=lambda run: -run[2]):
            if self._candidates_left == 0:
                break
            self._candidates_left -= 1
            usable = self._usable(o, n, length)
            if not usable.all():
                skip, length = _longest_true(usable)
                o, n = o + skip, n + skip
            if length < least:
                continue
            length += self._grow(o + length, n + length, +1)
            left = self._grow(o - 1, n - 1, -1)
            o, n, length = o - left, n - left, length + left
            if self._used_once:
                self._free_old[o : o + length] = False
            self._free_new[n : n + length] = False
            taken.append((o, n, length))
        return taken

    def _usable(self, o: int, n: int, length: int) -> npt.NDArray[np.bool_]:
        """Returns which of `length` token pairs from (o, n) on are equal and free on both sides."""
        usable: npt.NDArray[np.bool_] = self._old[o : o + length] == self._new[n : n + length]
        usable &= self._free_old[o : o + length]
        usable &= self._free_new[n : n + length]
        return usable

    def _grow(self, o: int, n: int, step: int) -> int:
        """Returns how many token pairs from (o, n) on, in the direction of `step`, are equal and free on both sides."""
        limit = min(len(self._old) - o, len(self._new) - n) if step > 0 else min(o, n) + 1
        grown, size = 0, 16
        while grown < limit:
            size = min(size, limit - grown)
            at = grown if step > 0 else -grown - size + 1
            usable = self._usable(o + at, n + at, size)[::step]
            if not usable.all():
                return grown + int(usable.argmin())
            grown, size = grown + size, size * 4
        return grown


def _free_grams(ids: Ints, free: npt.NDArray[np.bool_], k: int) -> tuple[Ints, npt.NDArray[np.uint64]]:
    """Returns the first tokens and the hashes of the k-grams whose tokens are all free; others are not hashed."""
    at = np.flatnonzero(free)
    if len(at) < k:
        return at[:0], np.empty(0, np.uint64)
    whole = at[k - 1 :] - at[: len(at) - k + 1] == k - 1
    return at[: len(whole)][whole], gram_hashes(ids[at], k)[whole]


def _still_free(
    starts: Ints, hashes: npt.NDArray[np.uint64], free: npt.NDArray[np.bool_], k: int
) -> tuple[Ints, npt.NDArray[np.uint64]]:
    """Returns those of these k-grams whose tokens are all free."""
    taken = np.concatenate(([0], np.cumsum(~free)))
    stay = taken[starts + k] == taken[starts]
    return starts[stay], hashes[stay]


def _stretches(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns the stretches of True as (start, stop), ascending."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _longest_true(flags: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Returns start and length of the longest stretch of True, (0, 0) when there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[::2][longest]), int(lengths[longest])
