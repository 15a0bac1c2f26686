"""The control arm: as many tokens as the others take, anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.registry import register
from agentcache.recovery.rows import block_runs, blocks_within, by_block, check_count, suffix_rows

__all__ = ["Random"]


@register
@dataclass(frozen=True)
class Random(RecoveryPolicy):
    """Lossy: recomputes random blocks of the aligned suffix, a control that any other selection must beat.

    Deterministic: the blocks follow from the seed and the prompt's token ids alone. Selection costs no forward pass.

    Attributes:
        k: Most tokens that are recomputed (the paper's Random at budget K; formulas, EditLocal 5).
        block: Tokens a block. **choice**: 8, since our rivals of it select blocks; 1 gives the paper's single positions.
        seed: Another seed gives other blocks.
    """

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "the random arm of Contiguity/EditLocal and PatchKV"

    k: int = 32
    block: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.name, "k", self.k, 0)
        check_count(self.name, "block", self.block, 1)

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns blocks in random order, which is also the order in which a bound keeps them."""
        sizes = by_block(suffix_rows(context.diff), self.block, fill=False).sum(axis=1)
        ids = np.ascontiguousarray(context.token_ids, dtype="<i4")
        named = hashlib.blake2b(f"{self.seed}:".encode() + ids.tobytes(), digest_size=16)
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(named.digest(), "little")))
        shuffled = generator.permutation(np.flatnonzero(sizes))
        return block_runs(blocks_within(shuffled, sizes, self.k), self.block)
