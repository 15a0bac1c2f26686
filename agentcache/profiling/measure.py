"""One pair of revisions, from an edit to what a profile is fitted to: the caller's side of `engine.profile_rpc`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import xxhash

from agentcache.episodes.diff import diff_tokens
from agentcache.profiling.edits import Edit, Message
from agentcache.profiling.fit import TrainingPair

__all__ = ["LEAST_SUFFIX", "Found", "Pair", "Render", "Wanted", "pair_key", "pairs_of", "training_pair"]

LEAST_SUFFIX: Final = 128
"""Tokens behind the last edit, four blocks: less says nothing of how drift falls with distance."""

Found = Mapping[str, Any]
"""What `AgentCache.profile_pair` returned."""

Render = Callable[[Sequence[Message]], Sequence[int]]
"""Returns the ids of chat messages."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two adjacent revisions as token ids.

    Attributes:
        id: Of the edit.
        dataset: Where its text is from.
        task: Its task.
        old: Ids before the edit.
        new: Ids after it.
    """

    id: str
    dataset: str
    task: str
    old: list[int]
    new: list[int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is measured on each pair beside its drift: the options of `measure_pair`.

    Attributes:
        arms: Policies and their options.
        precisions: Ways to store the old prompt.
        blocks: That are stored in 4 bits one by one.
        reply_tokens: Next tokens after the first that are compared.
    """

    arms: tuple[tuple[str, dict[str, Any]], ...] = ()
    precisions: tuple[dict[str, Any], ...] = field(default=())
    blocks: int = 0
    reply_tokens: int = 0

    def options(self) -> dict[str, Any]:
        """Returns them as keyword arguments of `AgentCache.profile_pair`."""
        return asdict(self)


def pairs_of(
    edits: Iterable[Edit],
    render: Render,
    *,
    max_tokens: int,
    least_suffix: int = LEAST_SUFFIX,
) -> Iterator[Pair]:
    """Yields the edits that can be measured: short enough, and with enough tokens behind the last place that changed.

    Args:
        edits: In order.
        render: Returns the ids of chat messages.
        max_tokens: Most tokens of either revision.
        least_suffix: Fewest tokens of the aligned run that ends the prompt.
    """
    for edit in edits:
        old, new = (list(render(side)) for side in (edit.old, edit.new))
        if max(len(old), len(new)) > max_tokens:
            continue
        suffix = diff_tokens(old, new).suffix
        if suffix and suffix[-1].length >= least_suffix:
            yield Pair(edit.id, edit.dataset, edit.task, old, new)


def pair_key(model_hash: str, pair: Pair, wanted: Wanted) -> str:
    """Returns 32 hex digits that name a measurement: equal ones need not be made twice."""
    what = [model_hash, pair.old, pair.new, wanted.options()]
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def training_pair(found: Found) -> TrainingPair:
    """Returns what the length model is fitted to."""
    return TrainingPair(**{**found["last"], "deviation": tuple(found["last"]["deviation"])})
