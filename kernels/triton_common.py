"""What the Triton kernels share: tile records, and small device functions."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["TILE_COLUMNS", "as_scale", "round_even", "row_offsets", "row_pointers", "scale_bits"]

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
def row_pointers(
    page_base,
    table,
    positions,
    live,
    head,
    page_tokens,
    page_stride,
    base,
    head_stride,
    token,
    D: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Returns where the rows of int64 positions start: a pointer each, and each row's start in the table of cells.

    The pointers carry all that may exceed 32 bits; what is added to them stays within a page.
    """
    page = tl.load(table + positions // page_tokens, mask=live, other=0)
    slot = positions % page_tokens
    pointers = page_base + page * page_stride
    if not TABLE:
        pointers += base + head * head_stride + slot * token
    return pointers, (head * page_tokens + slot) * D


@triton.jit
def row_offsets(cells, rows, dims, mask, stride, TABLE: tl.constexpr):
    """Returns the offsets of dimensions in rows, by the stride or from the table of cells; `rows` and `dims` broadcast."""
    return tl.load(cells + rows + dims, mask=mask, other=0) if TABLE else dims * stride
