"""`value_residual` on GPU: squared error and squared norm of a tile of values, one head and layer a program."""

from __future__ import annotations

import triton
import triton.language as tl

from agentcache.kernels.triton_common import as_scale, row_offsets, row_pointers
from agentcache.kernels.triton_quantize_gather import uint4_codes, uint4_words

__all__ = ["residual_kernel"]


@triton.jit
def residual_kernel(
    pages,
    table,
    v_cells,
    out,
    start,
    length,
    page_tokens,
    page_stride,
    v_base,
    v_head,
    v_token,
    v_dim,
    D: tl.constexpr,
    WIDTH_POW: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    V_TABLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Writes the sums of a tile's tokens to `out` [L, H, 2, N]: squared error, squared norm. Grid: (token tiles, H, L)."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    page_base = tl.load(pages + layer).to(tl.pointer_type(DTYPE))
    live = tokens < length
    source, rows = row_pointers(
        page_base, table, start + tokens, live, head, page_tokens, page_stride, v_base, v_head, v_token, D, V_TABLE
    )
    WIDTH: tl.constexpr = D // GROUPS
    lane = tl.arange(0, WIDTH_POW)
    inside = live[:, None] & (lane < WIDTH)[None, :]
    error = tl.zeros((TOKENS,), tl.float32)
    norm = tl.zeros((TOKENS,), tl.float32)
    for g in range(GROUPS):
        dims = g * WIDTH + lane
        at = row_offsets(v_cells, rows[:, None], dims[None, :], inside, v_dim, V_TABLE)
        x = tl.load(source[:, None] + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.maximum(tl.max(x, axis=1), 0.0)
        low = tl.minimum(tl.min(x, axis=1), 0.0)
        word, inverse, zero = uint4_words(high, low)
        scale, _ = as_scale(word >> 4, 19)
        left = x - (uint4_codes(x, inverse[:, None], zero[:, None]) - zero[:, None]) * scale[:, None]
        error += tl.sum(left * left, axis=1)
        norm += tl.sum(x * x, axis=1)
    row = out + (layer * tl.num_programs(1) + head) * 2 * length + tokens
    tl.store(row, error, mask=live)
    tl.store(row + length, norm, mask=live)
