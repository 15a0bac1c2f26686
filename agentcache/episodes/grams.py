"""Matching of token k-grams between two sequences: vectorised, linear apart from one sort. Pure numpy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["GramRuns", "Ints", "Side", "gram_hashes", "heaviest_chain", "match_grams"]

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_BASE = 0xD1342543DE82EF95  # odd, so that multiplication is a bijection modulo 2^64
_WORD = (1 << 64) - 1


class Side(NamedTuple):
    """The k-grams of one sequence that may be matched.

    Attributes:
        starts: `[G]` first token of each gram, ascending.
        hashes: `[G]` hash of each gram.
        gaps: `[G]` index of the gap that the gram lies in; only grams of equal gaps are matched.
    """

    starts: Ints
    hashes: Hashes
    gaps: Ints


class GramRuns(NamedTuple):
    """Runs of matched grams on one diagonal, ascending in the new sequence; no gram is used twice.

    Attributes:
        old: `[R]` first old token.
        new: `[R]` first new token.
        grams: `[R]` how many consecutive grams match.
    """

    old: Ints
    new: Ints
    grams: Ints


def gram_hashes(ids: Ints, k: int) -> Hashes:
    """Returns the polynomial hash of every k-gram of ids `[T]` as `[max(T - k + 1, 0)]`.

    Built by doubling, `h_{a+b}[i] = h_a[i] * B^b + h_b[i + a]` modulo 2^64: `2 log2 k` passes. Use the high bits.
    """
    count = len(ids) - k + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    single = ids.astype(np.uint64) * _GOLDEN
    single ^= single >> np.uint64(29)
    single *= _MIX
    done, total = 0, np.zeros(len(ids), np.uint64)
    power, width = single, 1
    while True:
        if k & width:
            tail = len(power) - done
            total = total[:tail] * np.uint64(pow(_BASE, width, 1 << 64)) + power[done:]
            done += width
        if done == k:
            return total[:count]
        power = power[: len(power) - width] * np.uint64(pow(_BASE, width, 1 << 64)) + power[width:]
        width *= 2


def match_grams(old: Side, new: Side, *, unique: bool) -> GramRuns:
    """Returns the runs of grams that pair up between two sides, by hash: the caller compares the tokens.

    Args:
        old: Grams of the old sequence.
        new: Grams of the new sequence.
        unique: Pair only grams that occur once on either side of their gap (patience). Otherwise the r-th old
            occurrence pairs with the r-th new one, which still aligns repeated text.
    """
    n_old, total = len(old.starts), len(old.starts) + len(new.starts)
    empty = np.empty(0, np.int64)
    if n_old == 0 or n_old == total:
        return GramRuns(empty, empty, empty)
    # One sort of (hash's high bits, index) groups equal grams, the old ones first, each side in ascending order.
    mask = np.uint64((1 << total.bit_length()) - 1)
    packed = np.concatenate((old.hashes, new.hashes))
    packed += np.concatenate((old.gaps, new.gaps)).astype(np.uint64) * _MIX
    packed &= ~mask
    packed |= np.arange(total, dtype=np.uint64)
    packed.sort()
    index = (packed & mask).astype(np.int64)
    packed &= ~mask
    first = np.flatnonzero(np.concatenate(([True], packed[1:] != packed[:-1])))
    count = np.diff(first, append=total)
    olds = np.add.reduceat((index < n_old).astype(np.int64), first)
    if unique:
        chosen = (count == 2) & (olds == 1)
        first, olds, pairs = first[chosen], olds[chosen], olds[chosen]
    else:
        pairs = np.minimum(olds, count - olds)
    rank = np.arange(int(pairs.sum())) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    i = index[np.repeat(first, pairs) + rank]
    j = index[np.repeat(first + olds, pairs) + rank] - n_old
    same_gap = old.gaps[i] == new.gaps[j]
    i, j = i[same_gap], j[same_gap]
    order = np.argsort(j)
    a, b = old.starts[i[order]], new.starts[j[order]]
    heads = np.flatnonzero(np.concatenate(([True], (np.diff(a) != 1) | (np.diff(b) != 1)))[: len(a)])
    return GramRuns(a[heads], b[heads], np.diff(heads, append=len(a)))


def heaviest_chain(positions: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Returns the indices of the subsequence with strictly increasing positions and the largest total of weights > 0.

    Keeps the Pareto frontier of (last position, weight): O(R log R) comparisons.
    """
    ends: list[int] = []
    best: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for item, (position, weight) in enumerate(zip(positions, weights, strict=True)):
        at = bisect_left(ends, position)
        total = weight + (best[at - 1] if at else 0)
        before.append(last[at - 1] if at else -1)
        stop = at
        while stop < len(ends) and best[stop] <= total:
            stop += 1
        if stop == at < len(ends) and ends[at] == position:
            continue  # a heavier chain ends at this very position
        ends[at:stop], best[at:stop], last[at:stop] = [position], [total], [item]
    chain, item = [], last[-1] if last else -1
    while item >= 0:
        chain.append(item)
        item = before[item]
    return chain[::-1]
