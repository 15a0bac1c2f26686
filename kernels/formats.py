"""The byte layout of packed KV, as arithmetic on sizes: no torch. `docs/checkpoint-format.md` is its prose.

Letters: L layers, H KV heads, D head dim, N tokens of a packed run, n tokens of one block (32, or what is left at the
run's end), G scale groups a value row.

```
run    = layer 0, layer 1, ...            layer = group 0, group 1, ...        group = head 0, head 1, ...
head   = key scales [D] u16 (not exact), then its blocks
block  = keys [D, n], value words [n, G] u16 (not exact), values [n, D] (k8v4: [n, D / 2] bytes)
```

A group is what shares key scales: 64 tokens, counted from the run's start; for `exact` one block. Groups and blocks at the
end of a run are as short as their tokens: nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["BLOCK", "FORMAT_VERSION", "PackedFormat", "Tag"]

FORMAT_VERSION = 1
BLOCK = 32  # tokens a block: the unit of tags, and what the kernels hold in registers
_GROUP = 64  # tokens that share a key scale
_VALUE_GROUP = 64  # most dimensions that share a value scale


class Tag(StrEnum):
    """The precision of a packed run."""

    EXACT = "exact"
    K8V8 = "k8v8"
    K8V4 = "k8v4"

    @property
    def code(self) -> int:
        """The tag as kernels know it."""
        return list(Tag).index(self)


@dataclass(frozen=True)
class PackedFormat:
    """Sizes and offsets of packed runs of one tag, in bytes.

    Attributes:
        tag: Precision.
        layers: L.
        kv_heads: H.
        head_dim: D, a multiple of 16 up to 512.
        element_size: Bytes of one element of the KV dtype.
    """

    tag: Tag
    layers: int
    kv_heads: int
    head_dim: int
    element_size: int

    def __post_init__(self) -> None:
        if not 16 <= self.head_dim <= 512 or self.head_dim % (8 * max(2, value_groups(self.head_dim))):
            raise ValueError(
                f"head_dim={self.head_dim}: packed KV needs 16 to 512, a multiple of 16 (above 128 of 32, above 256 of 64)"
            )
        if self.layers < 1 or self.kv_heads < 1 or self.element_size not in (2, 4):
            raise ValueError(f"{self} describes no KV cache: layers and heads from 1, element_size 2 or 4")

    @property
    def value_groups(self) -> int:
        """G: the smallest power of two that leaves at most 64 dimensions a group; 0 when exact."""
        return 0 if self.tag is Tag.EXACT else value_groups(self.head_dim)

    @property
    def group_tokens(self) -> int:
        """Tokens of a whole group."""
        return BLOCK if self.tag is Tag.EXACT else _GROUP

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group's key scales, one head."""
        return 0 if self.tag is Tag.EXACT else 2 * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes a token adds to its block, one head."""
        if self.tag is Tag.EXACT:
            return 2 * self.head_dim * self.element_size
        values = self.head_dim if self.tag is Tag.K8V8 else self.head_dim // 2
        return self.head_dim + 2 * self.value_groups + values

    def group_bytes(self, tokens: int) -> int:
        """Returns the bytes of one head of a group of `tokens` tokens."""
        return self.scale_bytes + tokens * self.token_bytes

    def layer_bytes(self, tokens: int) -> int:
        """Returns the bytes of one layer of a run of `tokens` tokens."""
        whole, rest = divmod(tokens, self.group_tokens)
        size = whole * self.group_bytes(self.group_tokens) + (self.group_bytes(rest) if rest else 0)
        return size * self.kv_heads

    def run_bytes(self, tokens: int) -> int:
        """Returns the bytes of a run of `tokens` tokens, all layers."""
        return self.layers * self.layer_bytes(tokens)

    def block_span(self, tokens: int, layer: int, head: int, block: int) -> tuple[int, int, int]:
        """Returns where one block of a run stands: (its group's key scales, its first byte, its tokens).

        Args:
            tokens: N of the whole run.
            layer: Layer.
            head: KV head.
            block: Block of the run.
        """
        group, within = divmod(block, self.group_tokens // BLOCK)
        group_tokens = min(self.group_tokens, tokens - group * self.group_tokens)
        scales = (
            layer * self.layer_bytes(tokens)
            + group * self.kv_heads * self.group_bytes(self.group_tokens)
            + head * self.group_bytes(group_tokens)
        )
        start = scales + self.scale_bytes + within * BLOCK * self.token_bytes
        return scales, start, min(BLOCK, tokens - block * BLOCK)


def value_groups(head_dim: int) -> int:
    """Returns G, the value scale groups of a row: the smallest power of two with at most 64 dimensions a group."""
    groups = 1
    while head_dim > groups * _VALUE_GROUP:
        groups *= 2
    return groups
