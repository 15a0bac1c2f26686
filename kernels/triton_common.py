"""What the Triton kernels share: tile records, and small device functions."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["TILE_COLUMNS", "as_scale", "cells_of", "pages_of", "round_even", "scale_bits"]

# Columns of a tile record: 32 tokens of a packed run (64 when gathering), as absolute and relative byte offsets.
DATA, LAYER_BYTES, GROUP_AT, HEAD_BYTES, BLOCK_AT, TOKENS, FIRST, STOP, POSITION, ANGLE = range(10)
TILE_COLUMNS = 10


@triton.jit
def round_even(x):
    """Rounds float32 of magnitude below 2 ** 22 to whole numbers, ties to even: what is added has no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def scale_bits(x, DROP: tl.constexpr):
    """Returns the upper bits of a non-negative float32, rounded up after dropping `DROP` mantissa bits; 0 below 2 ** -100."""
    bits = (x.to(tl.int32, bitcast=True) + ((1 << DROP) - 1)) >> DROP
    return tl.where(x < 7.888609052210118e-31, 0, bits)


@triton.jit
def as_scale(bits, DROP: tl.constexpr):
    """Returns the float32 of such bits and its inverse, 0 for 0."""
    scale = (bits << DROP).to(tl.float32, bitcast=True)
    return scale, tl.where(bits > 0, tl.div_rn(1.0, tl.where(bits > 0, scale, 1.0)), 0.0)


@triton.jit
def pages_of(table, positions, mask, page_tokens, page_stride):
    """Returns the element offset of each position's page, and its slot there."""
    page = tl.load(table + positions // page_tokens, mask=mask, other=0)
    return page * page_stride, positions % page_tokens


@triton.jit
def cells_of(
    cells, head, slots, dims, mask, page_tokens, base, head_stride, token, dim, D: tl.constexpr, TABLE: tl.constexpr
):
    """Returns element offsets in a page: by strides, or from the table `[H, B, D]`. `slots` and `dims` broadcast."""
    if TABLE:
        offsets = tl.load(cells + (head * page_tokens + slots) * D + dims, mask=mask, other=0)
    else:
        offsets = base + head * head_stride + slots * token + dims * dim
    return offsets
