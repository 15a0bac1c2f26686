"""`dequantize_scatter` on GPU: one program restores one block of one head and layer."""

from __future__ import annotations

import triton
import triton.language as tl

from agentcache.kernels.triton_common import TILE_COLUMNS, cells_of, pages_of

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
    D_POW: tl.constexpr,
    HALF: tl.constexpr,
    HALF_POW: tl.constexpr,
    REST_POW: tl.constexpr,
    GROUPS: tl.constexpr,
    TAG: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    K_TABLE: tl.constexpr,
    V_TABLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Dequantises a tile, turns its keys (HALF planes; 0: none), rounds once and writes its rows.

    Grid: (tiles, H, L). Addresses are int64 throughout; rows outside the tile's own tokens are masked off.
    TAG: 0 exact, 1 k8v8, 2 k8v4.
    """
    record = tiles + tl.program_id(0).to(tl.int64) * _COLUMNS
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    data = tl.load(record) + layer * tl.load(record + 1) + tl.load(record + 2) + head * tl.load(record + 3)
    block = data + tl.load(record + 4)
    n = tl.load(record + 5)
    first = tl.load(record + 6)
    stop = tl.load(record + 7)
    position = tl.load(record + 8)
    page_base = tl.load(pages + layer).to(tl.pointer_type(DTYPE))

    tokens = tl.arange(0, _BLOCK).to(tl.int64)
    live = (tokens >= first) & (tokens < stop)
    page, slots = pages_of(table, position + tokens, live, page_tokens, page_stride)
    EXACT: tl.constexpr = TAG == 0

    # Keys, [dims, tokens].
    if HALF > 0:
        plane = tl.arange(0, HALF_POW).to(tl.int64)
        inside = (plane < HALF)[:, None] & live[None, :]
        if INTERLEAVED:
            a = 2 * plane
            b = 2 * plane + 1
        else:
            a = plane
            b = plane + HALF
        angle = tl.load(record + 9) * HALF + plane
        c = tl.load(cos + angle, mask=plane < HALF, other=1.0)[:, None]
        s = tl.load(sin + angle, mask=plane < HALF, other=0.0)[:, None]
        x = _keys(block, data, a, tokens, n, inside, EXACT, DTYPE).to(tl.float32)
        y = _keys(block, data, b, tokens, n, inside, EXACT, DTYPE).to(tl.float32)
        at = cells_of(
            k_cells, head, slots[None, :], a[:, None], inside, page_tokens, k_base, k_head, k_token, k_dim, D, K_TABLE
        )
        tl.store(page_base + page[None, :] + at, (x * c - y * s).to(DTYPE), mask=inside)
        at = cells_of(
            k_cells, head, slots[None, :], b[:, None], inside, page_tokens, k_base, k_head, k_token, k_dim, D, K_TABLE
        )
        tl.store(page_base + page[None, :] + at, (y * c + x * s).to(DTYPE), mask=inside)
    if REST_POW > 0:
        dims = 2 * HALF + tl.arange(0, REST_POW).to(tl.int64)
        inside = (dims < D)[:, None] & live[None, :]
        keys = _keys(block, data, dims, tokens, n, inside, EXACT, DTYPE)
        at = cells_of(
            k_cells,
            head,
            slots[None, :],
            dims[:, None],
            inside,
            page_tokens,
            k_base,
            k_head,
            k_token,
            k_dim,
            D,
            K_TABLE,
        )
        tl.store(page_base + page[None, :] + at, keys.to(DTYPE), mask=inside)

    # Values, [tokens, dims].
    if TAG == 2:
        words = (block + D * n).to(tl.pointer_type(tl.uint16))
        codes = (block + (D + 2 * GROUPS) * n).to(tl.pointer_type(tl.uint8))
        byte = tl.arange(0, D_POW // 2).to(tl.int64)
        inside = live[:, None] & (byte < D // 2)[None, :]
        packed = tl.load(codes + tokens[:, None] * (D // 2) + byte[None, :], mask=inside, other=0).to(tl.int32)
        for upper in tl.static_range(2):
            dims = byte + upper * (D // 2)
            word = tl.load(
                words + tokens[:, None] * GROUPS + (dims // (D // GROUPS))[None, :], mask=inside, other=0
            ).to(tl.int32)
            scale = ((word >> 4) << 19).to(tl.float32, bitcast=True)
            value = (((packed >> (4 * upper)) & 15) - (word & 15)).to(tl.float32) * scale
            at = cells_of(
                v_cells,
                head,
                slots[:, None],
                dims[None, :],
                inside,
                page_tokens,
                v_base,
                v_head,
                v_token,
                v_dim,
                D,
                V_TABLE,
            )
            tl.store(page_base + page[:, None] + at, value.to(DTYPE), mask=inside)
    else:
        dims = tl.arange(0, D_POW).to(tl.int64)
        inside = live[:, None] & (dims < D)[None, :]
        if EXACT:
            start = block.to(tl.pointer_type(DTYPE)) + D * n
            value = tl.load(start + tokens[:, None] * D + dims[None, :], mask=inside, other=0.0)
        else:
            words = (block + D * n).to(tl.pointer_type(tl.bfloat16))
            codes = (block + (D + 2 * GROUPS) * n).to(tl.pointer_type(tl.int8))
            scale = tl.load(
                words + tokens[:, None] * GROUPS + (dims // (D // GROUPS))[None, :], mask=inside, other=0.0
            ).to(tl.float32)
            value = tl.load(codes + tokens[:, None] * D + dims[None, :], mask=inside, other=0).to(tl.float32) * scale
        at = cells_of(
            v_cells,
            head,
            slots[:, None],
            dims[None, :],
            inside,
            page_tokens,
            v_base,
            v_head,
            v_token,
            v_dim,
            D,
            V_TABLE,
        )
        tl.store(page_base + page[:, None] + at, value.to(DTYPE), mask=inside)
