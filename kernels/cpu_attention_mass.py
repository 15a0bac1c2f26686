"""`attention_mass` on CPU: the mean attention of queries over paged keys, eight query rows at a time."""

from __future__ import annotations

import numpy as np

from agentcache.kernels.cpu_compile import compiled
from agentcache.kernels.cpu_plan import (
    DIM,
    ESIZE,
    K_BASE,
    K_DIM,
    K_HEAD,
    K_LINES,
    PAGE_STRIDE,
    PAGE_TOKENS,
)
from agentcache.kernels.cpu_simd import add_scaled32, copy_element, dot_lines8, exp2_sum32, max32
from agentcache.kernels.formats import BLOCK

__all__ = ["ROWS", "mass_items"]

ROWS = 8  # query rows an item


@compiled
def mass_items(low, high, step, queries, limits, geometry, base, table, cells, out, scores, lines, like):
    """Adds the attention of the items `[low, high)` of the (head, eight rows) grid to row `low // step` of `out`.

    Args:
        low: First item.
        high: Item after the last.
        step: Items a row of `out`.
        queries: float32 `[H, rows, D]`, times the logit scale and log2 e; rows is a multiple of 8.
        limits: int64 `[rows]`, how many keys a row sees; 0 for padding.
        geometry: int64 `[16]`.
        base: Address of the layer's KV tensor.
        table: int64 page table.
        cells: int64 `[H, B, D]`.
        out: float32 `[n, lines * 32]`.
        scores: float32 `[8, lines * 32]`, scratch.
        lines: uint8 `[D * 32 * element size]`, scratch.
        like: An array of the element type.
    """
    dim, size, per_page = geometry[DIM], geometry[ESIZE], geometry[PAGE_TOKENS]
    tokens, per_head = out.shape[1], queries.shape[1] // ROWS
    target = out.ctypes.data + low // step * tokens * 4
    for item in range(low, high):
        head, group = divmod(item, per_head)
        rows = queries.ctypes.data + (head * queries.shape[1] + group * ROWS) * dim * 4
        longest = limits[group * ROWS : (group + 1) * ROWS].max()
        for first in range(0, longest, BLOCK):
            if geometry[K_LINES]:
                index, slot = divmod(first, per_page)
                at = table[index] * geometry[PAGE_STRIDE] + geometry[K_BASE] + head * geometry[K_HEAD] + slot
                keys, pitch = base + at * size, geometry[K_DIM] * size
            else:
                keys, pitch = np.int64(lines.ctypes.data), BLOCK * size
                for t in range(min(BLOCK, longest - first)):
                    index, slot = divmod(first + t, per_page)
                    page = base + table[index] * geometry[PAGE_STRIDE] * size
                    for d in range(dim):
                        copy_element(keys + d * pitch + t * size, page + cells[head, slot, d] * size, like)
            dot_lines8(rows, dim, keys, pitch, scores.ctypes.data + first * 4, tokens * 4, like)
        for r in range(ROWS):
            limit = limits[group * ROWS + r]
            stop = (limit + BLOCK - 1) // BLOCK * BLOCK
            for t in range(limit, stop):
                scores[r, t] = -np.inf
            row = scores.ctypes.data + r * tokens * 4
            top, total = np.float32(-np.inf), np.float32(0.0)
            for first in range(0, stop, BLOCK):
                top = max(top, max32(row + first * 4, like))
            for first in range(0, stop, BLOCK):
                total += exp2_sum32(row + first * 4, top, like)
            for first in range(0, stop, BLOCK):
                add_scaled32(target + first * 4, row + first * 4, np.float32(1.0) / total, like)
