"""`quantize_gather` on GPU: one program packs one group of one head and layer."""

from __future__ import annotations

import triton
import triton.language as tl

from agentcache.kernels.triton_common import TILE_COLUMNS, as_scale, round_even, row_offsets, row_pointers, scale_bits

__all__ = ["gather_kernel"]

_BLOCK = tl.constexpr(32)
_COLUMNS = tl.constexpr(TILE_COLUMNS)


@triton.jit
def _clamp(x, low, high):
    """Clamps; NaN gives `low`."""
    return tl.where(x > low, tl.where(x < high, x, high), low)


@triton.jit
def uint4_words(high, low):
    """Returns (word, inverse scale, zero point) of the extremes of 4-bit groups."""
    bits = scale_bits(tl.div_rn(high - low, 15.0), 19)
    _, inverse = as_scale(bits, 19)
    zero = round_even(_clamp(-low * inverse, 0.0, 15.0))
    return (bits << 4) | zero.to(tl.int32), inverse, zero


@triton.jit
def uint4_codes(x, inverse, zero):
    """Returns 4-bit codes as float32."""
    return _clamp(round_even(_clamp(x * inverse, -32.0, 32.0)) + zero, 0.0, 15.0)


@triton.jit
def gather_kernel(
    tiles,
    pages,
    table,
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
    CHUNK: tl.constexpr,
    WIDTH_POW: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKEN_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    TAG: tl.constexpr,
    K_TABLE: tl.constexpr,
    V_TABLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Packs a tile: up to 64 tokens (32 when exact) from position POSITION on.

    Grid: (tiles, H, L). TAG: 0 exact, 1 k8v8, 2 k8v4. Nothing beyond the tile's own bytes is written.
    """
    record = tiles + tl.program_id(0).to(tl.int64) * _COLUMNS
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    data = tl.load(record) + layer * tl.load(record + 1) + tl.load(record + 2) + head * tl.load(record + 3)
    count = tl.load(record + 5).to(tl.int32)
    page_base = tl.load(pages + layer).to(tl.pointer_type(DTYPE))

    TOKENS: tl.constexpr = 32 if TAG == 0 else 64
    tokens = tl.arange(0, TOKENS)
    live = tokens < count
    first = tl.load(record + 8)
    positions = first + tokens
    within = tokens % _BLOCK
    n = tl.minimum(count - (tokens - within), _BLOCK)  # tokens of each token's own block
    block = data + SCALE_BYTES + (tokens - within) * TOKEN_BYTES

    # Keys, [dims, tokens], CHUNK dimensions at a time.
    source, rows = row_pointers(
        page_base, table, positions, live, head, page_tokens, page_stride, k_base, k_head, k_token, D, K_TABLE
    )
    for chunk in range(0, D, CHUNK):
        dims = chunk + tl.arange(0, CHUNK)
        inside = (dims < D)[:, None] & live[None, :]
        at = row_offsets(k_cells, rows[None, :], dims[:, None], inside, k_dim, K_TABLE)
        keys = tl.load(source[None, :] + at, mask=inside, other=0.0)
        row = dims[:, None] * n[None, :] + within[None, :]
        if TAG == 0:
            tl.store(block[None, :].to(tl.pointer_type(DTYPE)) + row, keys, mask=inside)
        else:
            keys = keys.to(tl.float32)
            bits = scale_bits(tl.div_rn(tl.max(tl.abs(keys), axis=1), 127.0), 16)
            tl.store(data.to(tl.pointer_type(tl.uint16)) + dims, bits.to(tl.uint16), mask=dims < D)
            _, inverse = as_scale(bits, 16)
            codes = _clamp(round_even(_clamp(keys * inverse[:, None], -128.0, 128.0)), -127.0, 127.0)
            tl.store(block[None, :].to(tl.pointer_type(tl.int8)) + row, codes.to(tl.int8), mask=inside)

    # Values, [tokens, dims], a block at a time, and of a row what shares a scale: every reduction is over one scale.
    row_of = tl.arange(0, _BLOCK)
    for start in range(0, TOKENS, _BLOCK):
        size = tl.minimum(count - start, _BLOCK)
        alive = row_of < size
        place, cells_at = row_pointers(
            page_base,
            table,
            first + start + row_of,
            alive,
            head,
            page_tokens,
            page_stride,
            v_base,
            v_head,
            v_token,
            D,
            V_TABLE,
        )
        part = data + SCALE_BYTES + start * TOKEN_BYTES
        words = (part + D * size).to(tl.pointer_type(tl.uint16)) + GROUPS * row_of
        values = part + (D + 2 * GROUPS) * size
        if TAG == 0:
            out = part.to(tl.pointer_type(DTYPE)) + D * size + row_of * D
            for chunk in range(0, D, CHUNK):
                dims = chunk + tl.arange(0, CHUNK)
                inside = alive[:, None] & (dims < D)[None, :]
                at = row_offsets(v_cells, cells_at[:, None], dims[None, :], inside, v_dim, V_TABLE)
                value = tl.load(place[:, None] + at, mask=inside, other=0.0)
                tl.store(out[:, None] + dims[None, :], value, mask=inside)
        elif TAG == 1:
            WIDTH: tl.constexpr = D // GROUPS
            lane = tl.arange(0, WIDTH_POW)
            inside = alive[:, None] & (lane < WIDTH)[None, :]
            out = values.to(tl.pointer_type(tl.int8)) + row_of * D
            for g in range(GROUPS):
                dims = g * WIDTH + lane
                at = row_offsets(v_cells, cells_at[:, None], dims[None, :], inside, v_dim, V_TABLE)
                value = tl.load(place[:, None] + at, mask=inside, other=0.0).to(tl.float32)
                bits = scale_bits(tl.div_rn(tl.max(tl.abs(value), axis=1), 127.0), 16)
                tl.store(words + g, bits.to(tl.uint16), mask=alive)
                _, inverse = as_scale(bits, 16)
                codes = _clamp(round_even(_clamp(value * inverse[:, None], -128.0, 128.0)), -127.0, 127.0)
                tl.store(out[:, None] + dims[None, :], codes.to(tl.int8), mask=inside)
        else:
            PAIRS: tl.constexpr = GROUPS // 2 if GROUPS > 1 else 1
            WIDTH: tl.constexpr = D // 2 // PAIRS
            lane = tl.arange(0, WIDTH_POW)
            inside = alive[:, None] & (lane < WIDTH)[None, :]
            out = values.to(tl.pointer_type(tl.uint8)) + row_of * (D // 2)
            for pair in range(PAIRS):
                dims = pair * WIDTH + lane
                at = row_offsets(v_cells, cells_at[:, None], dims[None, :], inside, v_dim, V_TABLE)
                lower = tl.load(place[:, None] + at, mask=inside, other=0.0).to(tl.float32)
                at = row_offsets(v_cells, cells_at[:, None], dims[None, :] + D // 2, inside, v_dim, V_TABLE)
                upper = tl.load(place[:, None] + at, mask=inside, other=0.0).to(tl.float32)
                high1 = tl.maximum(tl.max(lower, axis=1), 0.0)
                low1 = tl.minimum(tl.min(lower, axis=1), 0.0)
                high2 = tl.maximum(tl.max(upper, axis=1), 0.0)
                low2 = tl.minimum(tl.min(upper, axis=1), 0.0)
                if GROUPS == 1:
                    high1 = tl.maximum(high1, high2)
                    low1 = tl.minimum(low1, low2)
                    high2 = high1
                    low2 = low1
                word1, inverse1, zero1 = uint4_words(high1, low1)
                word2, inverse2, zero2 = uint4_words(high2, low2)
                tl.store(words + pair, word1.to(tl.uint16), mask=alive)
                if GROUPS > 1:
                    tl.store(words + pair + PAIRS, word2.to(tl.uint16), mask=alive)
                code = uint4_codes(lower, inverse1[:, None], zero1[:, None]).to(tl.int32)
                code = code | (uint4_codes(upper, inverse2[:, None], zero2[:, None]).to(tl.int32) << 4)
                tl.store(out[:, None] + dims[None, :], code.to(tl.uint8), mask=inside)
