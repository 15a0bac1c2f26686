"""`dequantize_scatter` on GPU: one program restores one block of one head and layer."""

from __future__ import annotations

import triton
import triton.language as tl

from agentcache.kernels.triton_common import TILE_COLUMNS, row_offsets, row_pointers

__all__ = ["scatter_kernel"]

_BLOCK = tl.constexpr(32)
_COLUMNS = tl.constexpr(TILE_COLUMNS)


@triton.jit
def _keys(block, scales, dims, tokens, n, mask, EXACT: tl.constexpr, DTYPE: tl.constexpr):
    """Returns keys `[dims, tokens]`: float32, or the KV dtype itself when exact."""
    at = dims[:, None] * n + tokens[None, :]
    if EXACT:
        out = tl.load(block.to(tl.pointer_type(DTYPE)) + at, mask=mask, other=0.0)
    else:
        scale = tl.load(scales.to(tl.pointer_type(tl.bfloat16)) + dims[:, None], mask=mask, other=0.0).to(tl.float32)
        out = tl.load(block.to(tl.pointer_type(tl.int8)) + at, mask=mask, other=0).to(tl.float32) * scale
    return out


@triton.jit
def scatter_kernel(
    tiles,
    pages,
    table,
    cos,
    sin,
    k_cells,
    v_cells,
    page_tokens,
    page_stride,
    k_base,
    k_head,
    k_token,
    k_dim,
    v_base,
    v_head,
    v_token,
    v_dim,
    D: tl.constexpr,
    HALF: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    TAG: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    K_TABLE: tl.constexpr,
    V_TABLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Dequantises a tile, turns its keys (HALF planes; 0: none), rounds once and writes its rows.

    Grid: (tiles, H, L). Rows outside the tile's own tokens are masked off. At most CHUNK dimensions are worked on at a time,
    so that four warps hold them in registers. TAG: 0 exact, 1 k8v8, 2 k8v4.
    """
    record = tiles + tl.program_id(0).to(tl.int64) * _COLUMNS
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    data = tl.load(record) + layer * tl.load(record + 1) + tl.load(record + 2) + head * tl.load(record + 3)
    block = data + tl.load(record + 4)
    n = tl.load(record + 5).to(tl.int32)
    first = tl.load(record + 6).to(tl.int32)
    stop = tl.load(record + 7).to(tl.int32)
    page_base = tl.load(pages + layer).to(tl.pointer_type(DTYPE))

    tokens = tl.arange(0, _BLOCK)
    live = (tokens >= first) & (tokens < stop)
    positions = tl.load(record + 8) + tokens
    EXACT: tl.constexpr = TAG == 0

    # Keys, [dims, tokens].
    to, rows = row_pointers(
        page_base, table, positions, live, head, page_tokens, page_stride, k_base, k_head, k_token, D, K_TABLE
    )
    angles = tl.load(record + 9) * HALF
    for chunk in range(0, HALF, CHUNK):
        plane = chunk + tl.arange(0, CHUNK)
        inside = (plane < HALF)[:, None] & live[None, :]
        if INTERLEAVED:
            a = 2 * plane
            b = 2 * plane + 1
        else:
            a = plane
            b = plane + HALF
        c = tl.load(cos + angles + plane, mask=plane < HALF, other=1.0)[:, None]
        s = tl.load(sin + angles + plane, mask=plane < HALF, other=0.0)[:, None]
        x = _keys(block, data, a, tokens, n, inside, EXACT, DTYPE).to(tl.float32)
        y = _keys(block, data, b, tokens, n, inside, EXACT, DTYPE).to(tl.float32)
        at = row_offsets(k_cells, rows[None, :], a[:, None], inside, k_dim, K_TABLE)
        tl.store(to[None, :] + at, (x * c - y * s).to(DTYPE), mask=inside)
        at = row_offsets(k_cells, rows[None, :], b[:, None], inside, k_dim, K_TABLE)
        tl.store(to[None, :] + at, (y * c + x * s).to(DTYPE), mask=inside)
    for chunk in range(2 * HALF, D, CHUNK):
        dims = chunk + tl.arange(0, CHUNK)
        inside = (dims < D)[:, None] & live[None, :]
        keys = _keys(block, data, dims, tokens, n, inside, EXACT, DTYPE)
        at = row_offsets(k_cells, rows[None, :], dims[:, None], inside, k_dim, K_TABLE)
        tl.store(to[None, :] + at, keys.to(DTYPE), mask=inside)

    # Values, [tokens, dims].
    to, rows = row_pointers(
        page_base, table, positions, live, head, page_tokens, page_stride, v_base, v_head, v_token, D, V_TABLE
    )
    WIDTH: tl.constexpr = D // GROUPS
    if TAG == 2:
        words = (block + D * n).to(tl.pointer_type(tl.uint16)) + tokens * GROUPS
        codes = (block + (D + 2 * GROUPS) * n).to(tl.pointer_type(tl.uint8)) + tokens * (D // 2)
        for chunk in range(0, D // 2, CHUNK):
            byte = chunk + tl.arange(0, CHUNK)
            inside = live[:, None] & (byte < D // 2)[None, :]
            packed = tl.load(codes[:, None] + byte[None, :], mask=inside, other=0).to(tl.int32)
            for upper in tl.static_range(2):
                dims = byte + upper * (D // 2)
                word = tl.load(words[:, None] + (dims // WIDTH)[None, :], mask=inside, other=0).to(tl.int32)
                scale = ((word >> 4) << 19).to(tl.float32, bitcast=True)
                value = (((packed >> (4 * upper)) & 15) - (word & 15)).to(tl.float32) * scale
                at = row_offsets(v_cells, rows[:, None], dims[None, :], inside, v_dim, V_TABLE)
                tl.store(to[:, None] + at, value.to(DTYPE), mask=inside)
    else:
        for chunk in range(0, D, CHUNK):
            dims = chunk + tl.arange(0, CHUNK)
            inside = live[:, None] & (dims < D)[None, :]
            if EXACT:
                start = block.to(tl.pointer_type(DTYPE)) + D * n + tokens * D
                value = tl.load(start[:, None] + dims[None, :], mask=inside, other=0.0)
            else:
                words = (block + D * n).to(tl.pointer_type(tl.bfloat16)) + tokens * GROUPS
                codes = (block + (D + 2 * GROUPS) * n).to(tl.pointer_type(tl.int8)) + tokens * D
                scale = tl.load(words[:, None] + (dims // WIDTH)[None, :], mask=inside, other=0.0).to(tl.float32)
                value = tl.load(codes[:, None] + dims[None, :], mask=inside, other=0).to(tl.float32) * scale
            at = row_offsets(v_cells, rows[:, None], dims[None, :], inside, v_dim, V_TABLE)
            tl.store(to[:, None] + at, value.to(DTYPE), mask=inside)
