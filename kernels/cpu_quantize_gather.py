"""`quantize_gather` on CPU: pages to packed runs in one pass (gather by page table, scales, codes, packing).

The keys of a group are gathered line by line into rows of the first cache level, where a run that is not aligned to pages
is a window; values are read where they stand.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from agentcache.kernels.cpu_compile import compiled
from agentcache.kernels.cpu_plan import (
    DATA,
    DIM,
    DST,
    ESIZE,
    EXACT,
    GROUPS,
    HEADS,
    K8V4,
    K_BASE,
    K_DIM,
    K_HEAD,
    K_LINES,
    LAYER_BYTES,
    LENGTH,
    PAGE_STRIDE,
    PAGE_TOKENS,
    RUN_TOKENS,
    START,
    TAG,
    V_BASE,
    V_HEAD,
    V_ROWS,
    V_TOKEN,
    block_span,
)
from agentcache.kernels.cpu_simd import (
    absmax8,
    absmax32,
    copy,
    copy64,
    copy_element,
    float_of,
    from_ordered,
    highest8,
    highest32,
    lowest8,
    lowest32,
    quantise8,
    quantise32,
    quantise_nibbles8,
    quantise_nibbles32,
    scale_bits,
    store_u16,
)
from agentcache.kernels.cpu_team import share
from agentcache.kernels.cpu_vector import LINE_BYTES
from agentcache.kernels.formats import BLOCK

__all__ = ["gather", "nibble_word", "value_row"]

_WINDOW = 4 * BLOCK  # elements a scratch row: the three lines that 64 tokens can span, and one to read over


@njit(inline="always")
def _inverse(scale):
    return np.float32(1.0) / scale if scale > 0 else np.float32(0.0)


@njit(inline="always")
def _gather_keys(geometry, base, table, cells, head, position, count, window, like):
    """Fills rows of `window` with the keys of `count` positions, zeros up to 64; returns the address of the first."""
    dim, size, per_page = geometry[DIM], geometry[ESIZE], geometry[PAGE_TOKENS]
    pitch = _WINDOW * size
    if geometry[K_LINES]:
        offset = position & (BLOCK - 1)
        lines = (offset + count + BLOCK - 1) // BLOCK
        for i in range(lines):
            index, slot = divmod(position - offset + i * BLOCK, per_page)
            at = table[index] * geometry[PAGE_STRIDE] + geometry[K_BASE] + head * geometry[K_HEAD] + slot
            for d in range(dim):
                for part in range(BLOCK * size // LINE_BYTES):
                    copy64(
                        window + d * pitch + i * BLOCK * size + part * LINE_BYTES,
                        base + (at + d * geometry[K_DIM]) * size + part * LINE_BYTES,
                    )
        rows = window + offset * size
    else:
        rows = window
        for t in range(count):
            index, slot = divmod(position + t, per_page)
            page = base + table[index] * geometry[PAGE_STRIDE] * size
            for d in range(dim):
                copy_element(rows + d * pitch + t * size, page + cells[head, slot, d] * size, like)
    return rows


@njit(inline="always")
def _pack_keys(rows, scales, count, dim, size, codes, zeros, like):
    """Writes the int8 codes of up to 64 tokens: scales at `scales`, the two blocks' rows at `codes[0]` and `codes[1]`."""
    pitch = _WINDOW * size
    for d in range(dim):
        row = rows + d * pitch
        if count < 2 * BLOCK:
            copy(row + count * size, zeros, (2 * BLOCK - count) * size)
        top = max(absmax32(row, like), absmax32(row + BLOCK * size, like))
        bits = scale_bits(float_of(top, np.int32(0)) / np.float32(127.0), np.int32(16))
        store_u16(bits, scales + 2 * d)
        inverse = _inverse(float_of(bits, np.int32(16)))
        for block in range(2 if count > BLOCK else 1):
            n = min(BLOCK, count - block * BLOCK)
            out = codes[block] + d * n
            if n == BLOCK:
                quantise32(row + block * BLOCK * size, inverse, out, like)
            else:
                quantise32(row + block * BLOCK * size, inverse, zeros + _WINDOW * size, like)
                copy(out, zeros + _WINDOW * size, n)


@njit(inline="always")
def value_row(geometry, base, table, cells, head, position, scratch, like):
    """Returns the address of one position's value row, gathered to `scratch` where it is not contiguous."""
    dim, size = geometry[DIM], geometry[ESIZE]
    index, slot = divmod(position, geometry[PAGE_TOKENS])
    page = base + table[index] * geometry[PAGE_STRIDE] * size
    if geometry[V_ROWS]:
        return page + (geometry[V_BASE] + head * geometry[V_HEAD] + slot * geometry[V_TOKEN]) * size
    for d in range(dim):
        copy_element(scratch + d * size, page + cells[head, slot, d] * size, like)
    return scratch


@njit(inline="always")
def nibble_word(row, width, size, like):
    """Returns the word of a 4-bit group, its inverse scale and its zero point."""
    high, low = np.int32(0), np.int32(0)  # zero is always in range
    for i in range(width >> 5):
        high = max(high, highest32(row + 32 * i * size, like))
        low = min(low, lowest32(row + 32 * i * size, like))
    for i in range(width >> 3 & 3):
        at = row + ((width & ~31) + 8 * i) * size
        high = max(high, highest8(at, like))
        low = min(low, lowest8(at, like))
    top, bottom = from_ordered(high), from_ordered(low)
    bits = scale_bits((top - bottom) / np.float32(15.0), np.int32(19))
    inverse = _inverse(float_of(bits, np.int32(19)))
    zero = min(np.rint(-bottom * inverse), np.float32(15.0))
    return (bits << np.int32(4)) | np.int32(zero), inverse, zero


@njit(inline="always")
def _pack_nibbles(row, words, codes, dim, size, groups, inverses, zeros, like):
    """Writes one token's value words and 4-bit codes."""
    width = dim // groups
    for g in range(groups):
        word, inverses[g], zeros[g] = nibble_word(row + g * width * size, width, size, like)
        store_u16(np.int32(word), words + 2 * g)
    parts = max(groups >> 1, 1)
    width = (dim >> 1) // parts
    for part in range(parts):
        a, b = (part, part + parts) if groups > 1 else (0, 0)
        low, out = row + part * width * size, codes + part * width
        high = low + (dim >> 1) * size
        for i in range(width >> 5):
            at = 32 * i * size
            quantise_nibbles32(low + at, inverses[a], zeros[a], high + at, inverses[b], zeros[b], out + 32 * i, like)
        for i in range(width >> 3 & 3):
            j = (width & ~31) + 8 * i
            at = j * size
            quantise_nibbles8(low + at, inverses[a], zeros[a], high + at, inverses[b], zeros[b], out + j, like)


@njit(inline="always")
def _pack_bytes(row, words, codes, dim, size, groups, like):
    """Writes one token's value scales and int8 codes."""
    width = dim // groups
    for g in range(groups):
        at, out = row + g * width * size, codes + g * width
        top = np.int32(0)
        for i in range(width >> 5):
            top = max(top, absmax32(at + 32 * i * size, like))
        for i in range(width >> 3 & 3):
            top = max(top, absmax8(at + ((width & ~31) + 8 * i) * size, like))
        bits = scale_bits(float_of(top, np.int32(0)) / np.float32(127.0), np.int32(16))
        store_u16(bits, words + 2 * g)
        inverse = _inverse(float_of(bits, np.int32(16)))
        for i in range(width >> 5):
            quantise32(at + 32 * i * size, inverse, out + 32 * i, like)
        for i in range(width >> 3 & 3):
            j = (width & ~31) + 8 * i
            quantise8(at + j * size, inverse, out + j, like)


@njit(error_model="numpy")
def _loop(low, high, stretches, formats, geometry, pages, table, k_cells, v_cells, like):
    """Packs the items `[low, high)` of the (layer, stretch) grid.

    Args:
        low: First item.
        high: Item after the last.
        stretches: int64 `[n, 8]`, see `cpu_plan`; START is a multiple of 64.
        formats: int64 `[tags, 3]`.
        geometry: int64 `[16]`.
        pages: int64 `[L]`, addresses of the layers' KV tensors.
        table: int64 page table.
        k_cells: int64 `[H, B, D]`.
        v_cells: int64 `[H, B, D]`.
        like: An array of the element type.
    """
    dim, size, heads, groups = geometry[DIM], geometry[ESIZE], geometry[HEADS], geometry[GROUPS]
    # A window of every key dimension, zeros to pad it with, a row of codes, a value row.
    scratch = np.zeros((dim + 2) * _WINDOW * size + dim * size, np.uint8)
    window = scratch.ctypes.data
    blank = window + dim * _WINDOW * size
    value = blank + 2 * _WINDOW * size
    inverses, zeros, codes = np.zeros(8, np.float32), np.zeros(8, np.float32), np.zeros(2, np.int64)
    for item in range(low, high):
        layer, which = divmod(item, stretches.shape[0])
        stretch = stretches[which]
        tokens, tag, start, stop = stretch[RUN_TOKENS], stretch[TAG], stretch[START], stretch[START] + stretch[LENGTH]
        dst = stretch[DST] - start
        form = formats[tag, 0], formats[tag, 1], formats[tag, 2]
        base, layer_at = pages[layer], stretch[DATA] + layer * stretch[LAYER_BYTES]
        whole = BLOCK << form[0]
        for first in range(start, stop, whole):
            count = min(whole, tokens - first)
            blocks = 2 if count > BLOCK else 1
            for head in range(heads):
                rows = _gather_keys(geometry, base, table, k_cells, head, dst + first, count, window, like)
                scales = np.int64(0)
                for block in range(blocks):
                    scales, codes[block], _ = block_span(layer_at, tokens, form, heads, head, first // BLOCK + block)
                if tag == EXACT:
                    for d in range(dim):
                        copy(codes[0] + d * count * size, rows + d * _WINDOW * size, count * size)
                else:
                    _pack_keys(rows, scales, count, dim, size, codes, blank, like)
                for t in range(count):
                    block, token = t >> 5, t & 31
                    n = min(BLOCK, count - block * BLOCK)
                    row = value_row(geometry, base, table, v_cells, head, dst + first + t, value, like)
                    if tag == EXACT:
                        copy(codes[0] + (n + token) * dim * size, row, dim * size)
                    else:
                        words = codes[block] + dim * n + 2 * groups * token
                        values = codes[block] + (dim + 2 * groups) * n
                        if tag == K8V4:
                            at = values + (dim >> 1) * token
                            _pack_nibbles(row, words, at, dim, size, groups, inverses, zeros, like)
                        else:
                            _pack_bytes(row, words, values + dim * token, dim, size, groups, like)
    scratch[0] = 0  # numba frees an array after its last use


@compiled
def gather(team, threads, shares, items, *arguments):
    """Packs all items of the (layer, stretch) grid on a team of threads."""
    return share(team, threads, shares, items, _loop, arguments)
