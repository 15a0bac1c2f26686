"""`attention_mass` on CPU: the mean attention of queries over paged keys, eight query rows at a time.

A row's scores stay in the second cache level until its sum is known, so every key is multiplied once. Keys whose lines are
not contiguous in the pages are laid out once a head, not once for every eight rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit

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
from agentcache.kernels.cpu_simd import copy_element
from agentcache.kernels.cpu_simd_rows import add_scaled_row, dot_lines8, row_exp2_sum, row_max
from agentcache.kernels.cpu_team import share
from agentcache.kernels.formats import BLOCK

__all__ = ["ROWS", "mass"]

ROWS = 8  # query rows an item


@njit(inline="always")
def _lay_out(lines, geometry, base, table, cells, head, tokens, like):
    """Copies the keys of a head to `lines`: for every 32 tokens, the line of each dimension."""
    dim, size, per_page = geometry[DIM], geometry[ESIZE], geometry[PAGE_TOKENS]
    for first in range(0, tokens, BLOCK):
        block = lines + first * dim * size
        for t in range(min(BLOCK, tokens - first)):
            index, slot = divmod(first + t, per_page)
            page = base + table[index] * geometry[PAGE_STRIDE] * size
            for d in range(dim):
                copy_element(block + (d * BLOCK + t) * size, page + cells[head, slot, d] * size, like)


@njit(error_model="numpy")
def _loop(low, high, step, queries, limits, geometry, base, table, cells, out, like):
    """Adds up the attention of the items `[row * step, (row + 1) * step)` of the (head, eight rows) grid in each row of `out`.

    Args:
        low: First row.
        high: Row after the last.
        step: Items a row.
        queries: float32 `[H, rows, D]`, times the logit scale and log2 e; rows is a multiple of 8.
        limits: int64 `[rows]`, how many keys a row sees; 0 for padding.
        geometry: int64 `[16]`.
        base: Address of the layer's KV tensor.
        table: int64 page table.
        cells: int64 `[H, B, D]`.
        out: float32 `[n, lines * 32]`, zeros.
        like: An array of the element type.
    """
    dim, size, per_page = geometry[DIM], geometry[ESIZE], geometry[PAGE_TOKENS]
    tokens, per_head = out.shape[1], queries.shape[1] // ROWS
    scores = np.empty((ROWS, tokens), np.float32)
    lines = np.zeros(0 if geometry[K_LINES] else tokens * dim * size, np.uint8)
    held = -1  # whose keys `lines` holds
    for row in range(low, high):
        for item in range(row * step, min((row + 1) * step, queries.shape[0] * per_head)):
            head, group = divmod(item, per_head)
            if not geometry[K_LINES] and held != head:
                _lay_out(np.int64(lines.ctypes.data), geometry, base, table, cells, head, limits.max(), like)
                held = head
            rows = queries.ctypes.data + item * ROWS * dim * 4
            for first in range(0, limits[group * ROWS : (group + 1) * ROWS].max(), BLOCK):
                keys, pitch = np.int64(lines.ctypes.data) + first * dim * size, BLOCK * size
                if geometry[K_LINES]:
                    index, slot = divmod(first, per_page)
                    at = table[index] * geometry[PAGE_STRIDE] + geometry[K_BASE] + head * geometry[K_HEAD] + slot
                    keys, pitch = base + at * size, geometry[K_DIM] * size
                dot_lines8(rows, dim, keys, pitch, scores.ctypes.data + first * 4, tokens * 4, like)
            for r in range(ROWS):
                limit = limits[group * ROWS + r]
                seen = (limit + BLOCK - 1) // BLOCK
                for t in range(limit, seen * BLOCK):
                    scores[r, t] = -np.inf
                line = scores.ctypes.data + r * tokens * 4
                total = row_exp2_sum(line, seen, row_max(line, seen, like), like)
                if limit:
                    add_scaled_row(out.ctypes.data + row * tokens * 4, line, seen, np.float32(1.0) / total, like)


@compiled
def mass(team, threads, shares, items, *arguments):
    """Adds up the attention of all rows of `out` on a team of threads."""
    return share(team, threads, shares, items, _loop, arguments)
