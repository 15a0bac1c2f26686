"""`dequantize_scatter` on CPU: packed runs to pages in one pass (dequantise, turn the keys, round once, place).

Work goes by destination lines: 32 positions of one page. A line of a key dimension is cut from the rows of the two source
blocks that it spans, so an unaligned run costs what an aligned one does, and the tokens run along the vectors, so that a
plane's cosine is one broadcast and no lane moves. Values go a token at a time.

What decides the speed is memory (measured on Zen 5, 94 MB restored): whole lines are streamed past the caches, since an
ordinary store would read each line first (2x), and the next block is asked for while this one is worked on, since planes
that lie half a block apart defeat the hardware's prefetch (2.5x).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from agentcache.kernels.cpu_compile import compiled
from agentcache.kernels.cpu_plan import (
    ANGLE,
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
    K_STREAM,
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
    V_STREAM,
    V_TOKEN,
    block_span,
)
from agentcache.kernels.cpu_simd import (
    copy,
    copy_element,
    fence,
    float_of,
    load_u16,
    merge_elements,
    prefetch,
    scale_codes8,
    scale_codes16,
    scale_line,
    scale_nibbles8,
    scale_nibbles16,
    stream64,
    stream_codes32,
    stream_merged_elements,
    stream_nibbles32,
    stream_scaled_line,
    stream_turned_codes,
    stream_turned_elements,
    turn_codes,
    turn_elements,
)
from agentcache.kernels.cpu_team import share
from agentcache.kernels.cpu_vector import LINE_BYTES
from agentcache.kernels.formats import BLOCK

__all__ = ["scatter"]


@njit(inline="always")
def _bf16(address):
    return float_of(load_u16(address), np.int32(16))


@njit(inline="always")
def _rows(block, at, n, dim, size, pad):
    """Returns the address of a block's key rows, 32 elements apart, with a readable line before and after.

    A short block, and the first of a run (nothing may stand before it), are copied to `pad`.
    """
    if n == BLOCK and block > 0:
        return at
    for d in range(dim):
        copy(pad + d * BLOCK * size, at + d * n * size, n * size)
    return pad


@njit(inline="always")
def _exact_line(k1, k2, cut, dim, size, cos, sin, planes, turned, out, pitch, stream, soon, like):
    """Makes a line of every key dimension from exact rows; what does not turn is copied bit for bit."""
    rotary, step = 0, BLOCK * size
    if turned:
        rotary = 2 * planes.shape[1]
        for p in range(planes.shape[1]):
            a, b = planes[0, p], planes[1, p]
            x, y, out_a, out_b = a * step, b * step, out + a * pitch, out + b * pitch
            prefetch(soon + 2 * p * step)
            prefetch(soon + (2 * p + 1) * step)
            if stream:
                stream_turned_elements(k1 + x, k2 + x, k1 + y, k2 + y, cut, cos[p], sin[p], out_a, out_b, like)
            else:
                turn_elements(k1 + x, k2 + x, k1 + y, k2 + y, cut, cos[p], sin[p], out_a, out_b, like)
    for d in range(rotary, dim):
        prefetch(soon + d * step)
        if stream:
            stream_merged_elements(k1 + d * step, k2 + d * step, cut, out + d * pitch, like)
        else:
            merge_elements(k1 + d * step, k2 + d * step, cut, out + d * pitch, like)


@njit(inline="always")
def _lossy_line(k1, k2, s1, s2, cut, dim, cos, sin, planes, turned, out, pitch, stream, soon, like):
    """Makes a line of every key dimension from int8 rows and the scales of their two groups."""
    rotary = 0
    if turned:
        rotary = 2 * planes.shape[1]
        for p in range(planes.shape[1]):
            a, b = planes[0, p], planes[1, p]
            x, y, out_a, out_b = a * BLOCK, b * BLOCK, out + a * pitch, out + b * pitch
            a1, a2, b1, b2 = _bf16(s1 + 2 * a), _bf16(s2 + 2 * a), _bf16(s1 + 2 * b), _bf16(s2 + 2 * b)
            prefetch(soon + 2 * p * BLOCK)
            if stream:
                stream_turned_codes(
                    k1 + x, k2 + x, k1 + y, k2 + y, cut, a1, a2, b1, b2, cos[p], sin[p], out_a, out_b, like
                )
            else:
                turn_codes(k1 + x, k2 + x, k1 + y, k2 + y, cut, a1, a2, b1, b2, cos[p], sin[p], out_a, out_b, like)
    for d in range(rotary, dim):
        x, f1, f2 = d * BLOCK, _bf16(s1 + 2 * d), _bf16(s2 + 2 * d)
        prefetch(soon + x)
        if stream:
            stream_scaled_line(k1 + x, k2 + x, cut, f1, f2, out + d * pitch, like)
        else:
            scale_line(k1 + x, k2 + x, cut, f1, f2, out + d * pitch, like)


@njit(inline="always")
def _value_parts(dim, groups):
    """Returns (parts, their width, whether each has a scale of its own): nibbles halve a row, scales divide it further."""
    parts = max(groups, 2)
    return parts, dim // parts, groups > 1


@njit(inline="always")
def _nibble_row(words, codes, dim, size, parts, width, own, out, stream, like):
    """Dequantises one token's 4-bit values."""
    for part in range(parts):
        word = load_u16(words + (2 * part if own else 0))
        scale, zero = float_of(word >> np.int32(4), np.int32(19)), word & np.int32(15)
        upper = 2 * part >= parts
        shift = np.int32(4 if upper else 0)
        data, row = codes + part * width - (dim >> 1 if upper else 0), out + part * width * size
        if stream:
            for i in range(width >> 5):
                stream_nibbles32(data + 32 * i, shift, zero, scale, row + 32 * i * size, like)
        else:
            for i in range(width >> 4):
                scale_nibbles16(data + 16 * i, shift, zero, scale, row + 16 * i * size, like)
            if width & 8:
                scale_nibbles8(data + width - 8, shift, zero, scale, row + (width - 8) * size, like)


@njit(inline="always")
def _byte_row(words, codes, size, parts, width, own, out, stream, like):
    """Dequantises one token's 8-bit values."""
    for part in range(parts):
        scale = _bf16(words + (2 * part if own else 0))
        data, row = codes + part * width, out + part * width * size
        if stream:
            for i in range(width >> 5):
                stream_codes32(data + 32 * i, scale, row + 32 * i * size, like)
        else:
            for i in range(width >> 4):
                scale_codes16(data + 16 * i, scale, row + 16 * i * size, like)
            if width & 8:
                scale_codes8(data + width - 8, scale, row + (width - 8) * size, like)


@njit(inline="always")
def _value_rows(at, n, first, count, tag, dim, size, groups, out, pitch, stream, soon, like):
    """Makes the value rows `[first, first + count)` of a block of n tokens, `pitch` bytes apart at `out`."""
    if tag == EXACT:
        width = dim * size
        source = at + (n + first) * width
        for t in range(count):
            for i in range((width + LINE_BYTES - 1) // LINE_BYTES):
                prefetch(soon + (n + first + t) * width + i * LINE_BYTES)
            if stream:
                for i in range(width // LINE_BYTES):
                    stream64(out + t * pitch + i * LINE_BYTES, source + t * width + i * LINE_BYTES)
            else:
                copy(out + t * pitch, source + t * width, width)
        return
    parts, width, own = _value_parts(dim, groups)
    words, codes = at + dim * n, at + (dim + 2 * groups) * n
    width_bytes = dim >> 1 if tag == K8V4 else dim
    soon += codes - at
    for t in range(first, first + count):
        prefetch(soon + t * width_bytes)
        row = out + (t - first) * pitch
        if tag == K8V4:
            _nibble_row(
                words + 2 * groups * t, codes + t * width_bytes, dim, size, parts, width, own, row, stream, like
            )
        else:
            _byte_row(words + 2 * groups * t, codes + t * width_bytes, size, parts, width, own, row, stream, like)


@njit(inline="always")
def _copy_cells(base, geometry, cells, table, head, position, count, source, token_pitch, dim_pitch, like):
    """Copies `count` tokens to the cells of positions from `position` on, element by element."""
    size, per_page = geometry[ESIZE], geometry[PAGE_TOKENS]
    for t in range(count):
        index, token = divmod(position + t, per_page)
        page = base + table[index] * geometry[PAGE_STRIDE] * size
        for d in range(geometry[DIM]):
            copy_element(page + cells[head, token, d] * size, source + t * token_pitch + d * dim_pitch, like)


@njit(error_model="numpy")
def _loop(low, high, stretches, formats, geometry, pages, table, k_cells, v_cells, cos, sin, planes, like):
    """Restores the items `[low, high)` of the (layer, stretch) grid into the pages.

    Args:
        low: First item.
        high: Item after the last.
        stretches: int64 `[n, 8]`, see `cpu_plan`; destinations are disjoint.
        formats: int64 `[tags, 3]`.
        geometry: int64 `[16]`.
        pages: int64 `[L]`, addresses of the layers' KV tensors.
        table: int64 page table.
        k_cells: int64 `[H, B, D]`.
        v_cells: int64 `[H, B, D]`.
        cos: float32 `[angles, rotary_dim / 2]`.
        sin: The same.
        planes: int64 `[2, rotary_dim / 2]`.
        like: An array of the element type.
    """
    dim, size, heads, groups = geometry[DIM], geometry[ESIZE], geometry[HEADS], geometry[GROUPS]
    block_bytes, margin = dim * BLOCK * size, BLOCK * size
    # Two key blocks with a line before and after each, a line of every key dimension, 32 value rows.
    scratch = np.zeros(4 * (block_bytes + margin), np.uint8)
    pad1 = scratch.ctypes.data + margin
    pad2 = pad1 + block_bytes + margin
    keys = pad2 + block_bytes + margin
    values = keys + block_bytes
    for item in range(low, high):
        layer, which = divmod(item, stretches.shape[0])
        stretch = stretches[which]
        tokens, tag, start, dst = stretch[RUN_TOKENS], stretch[TAG], stretch[START], stretch[DST]
        stop, end = start + stretch[LENGTH], dst + stretch[LENGTH]
        first, last = start // BLOCK, (stop - 1) // BLOCK
        form = formats[tag, 0], formats[tag, 1], formats[tag, 2]
        exact, turned, angle = tag == EXACT, stretch[ANGLE] >= 0, max(stretch[ANGLE], 0)
        cosines, sines = cos[angle], sin[angle]
        base, layer_at = pages[layer], stretch[DATA] + layer * stretch[LAYER_BYTES]
        width = size if exact else 1
        for line in range(dst // BLOCK * BLOCK, end, BLOCK):
            at = max(line, dst)
            skip, count = at - line, min(line + BLOCK, end) - at
            # The line holds the source tokens [block * 32 + offset, ... + 32): of this block and of the one after it.
            block, offset = (line - dst + start) >> 5, (line - dst + start) & 31
            lower, upper = block >= first, offset > 0 and block < last
            index, slot = divmod(line, geometry[PAGE_TOKENS])
            page = base + (table[index] * geometry[PAGE_STRIDE] if geometry[K_LINES] + geometry[V_ROWS] else 0) * size
            for head in range(heads):
                k1, k2, s1, s2, at1, at2, n1, n2 = 0, 0, 0, 0, 0, 0, 0, 0
                if lower:
                    s1, at1, n1 = block_span(layer_at, tokens, form, heads, head, block)
                    k1 = _rows(block, at1, n1, dim, width, pad1) + offset * width
                if upper:
                    s2, at2, n2 = block_span(layer_at, tokens, form, heads, head, block + 1)
                    k2 = _rows(block + 1, at2, n2, dim, width, pad2) - (BLOCK - offset) * width
                # Where one of the two holds nothing of the line, the other stands for it.
                if not lower:
                    k1, s1 = k2, s2
                if not upper:
                    k2, s2 = k1, s1
                soon = block + (1 if offset else 0) + (1 if head + 1 == heads else 0)
                _, soon, _n = block_span(layer_at, tokens, form, heads, 0 if head + 1 == heads else head + 1, soon)

                stream = count == BLOCK and geometry[K_STREAM] > 0
                out, pitch = keys, margin
                key_at = page + (geometry[K_BASE] + head * geometry[K_HEAD] + slot) * size
                if stream:
                    out, pitch = key_at, geometry[K_DIM] * size
                cut = np.int32(BLOCK - offset)
                if exact:
                    _exact_line(k1, k2, cut, dim, size, cosines, sines, planes, turned, out, pitch, stream, soon, like)
                else:
                    _lossy_line(
                        k1, k2, s1, s2, cut, dim, cosines, sines, planes, turned, out, pitch, stream, soon, like
                    )
                if not stream:
                    if geometry[K_LINES]:
                        for d in range(dim):
                            to = key_at + skip * size + d * geometry[K_DIM] * size
                            copy(to, keys + skip * size + d * margin, count * size)
                    else:
                        _copy_cells(
                            base, geometry, k_cells, table, head, at, count, keys + skip * size, size, margin, like
                        )

                stream = geometry[V_STREAM] > 0 and (exact or dim % (32 * max(groups, 2)) == 0)
                out, pitch = values, dim * size
                if geometry[V_ROWS]:
                    pitch = geometry[V_TOKEN] * size
                    out = page + (geometry[V_BASE] + head * geometry[V_HEAD]) * size + (slot + skip) * pitch
                here = 0
                if lower:
                    here = min(BLOCK, stop - block * BLOCK) - max(offset, start - block * BLOCK)
                    begin = max(offset, start - block * BLOCK)
                    _value_rows(at1, n1, begin, here, tag, dim, size, groups, out, pitch, stream, soon, like)
                if count > here:
                    begin = max(0, start - (block + 1) * BLOCK)
                    out += here * pitch
                    _value_rows(at2, n2, begin, count - here, tag, dim, size, groups, out, pitch, stream, soon, like)
                if not geometry[V_ROWS]:
                    _copy_cells(base, geometry, v_cells, table, head, at, count, values, dim * size, size, like)
    fence()
    scratch[0] = 0  # numba frees an array after its last use


@compiled
def scatter(team, threads, shares, items, *arguments):
    """Restores all items of the (layer, stretch) grid on a team of threads."""
    return share(team, threads, shares, items, _loop, arguments)
