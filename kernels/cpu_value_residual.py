"""`value_residual` on CPU: what 4-bit codes would leave of each token's values, read where they stand."""

from __future__ import annotations

import numpy as np
from numba import njit

from agentcache.kernels.cpu_compile import compiled
from agentcache.kernels.cpu_plan import DIM, ESIZE, GROUPS, HEADS
from agentcache.kernels.cpu_quantize_gather import nibble_word, value_row
from agentcache.kernels.cpu_simd import float_of, nibble_error8, nibble_error32, squares8, squares32
from agentcache.kernels.cpu_team import share
from agentcache.kernels.formats import BLOCK

__all__ = ["residual"]


@njit(error_model="numpy")
def _loop(low, high, start, geometry, pages, table, v_cells, out, like):
    """Writes e^V of the tokens of the blocks `[low, high)`, counted from position `start` on.

    Args:
        low: First block of 32 tokens.
        high: Block after the last.
        start: Position of token 0.
        geometry: int64 `[16]`.
        pages: int64 `[L]`, addresses of the layers' KV tensors.
        table: int64 page table.
        v_cells: int64 `[H, B, D]`.
        out: float32 `[N]`.
        like: An array of the element type.
    """
    dim, size, groups = geometry[DIM], geometry[ESIZE], geometry[GROUPS]
    width = dim // groups
    scratch = np.zeros(dim * size, np.uint8)
    errors, norms = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for block in range(low, high):
        first = block * BLOCK
        count = min(BLOCK, len(out) - first)
        errors[:] = 0.0
        norms[:] = 0.0
        # A block's rows of one layer and head stand together in a page, those of one token do not.
        for layer in range(len(pages)):
            for head in range(geometry[HEADS]):
                for t in range(count):
                    row = value_row(
                        geometry,
                        pages[layer],
                        table,
                        v_cells,
                        head,
                        start + first + t,
                        np.int64(scratch.ctypes.data),
                        like,
                    )
                    error, norm = np.float32(0.0), np.float32(0.0)
                    for g in range(groups):
                        at = row + g * width * size
                        word, inverse, zero = nibble_word(at, width, size, like)
                        scale = float_of(word >> np.int32(4), np.int32(19))
                        for i in range(width >> 5):
                            error += nibble_error32(at + 32 * i * size, inverse, zero, scale, like)
                            norm += squares32(at + 32 * i * size, like)
                        for i in range(width >> 3 & 3):
                            part = at + ((width & ~31) + 8 * i) * size
                            error += nibble_error8(part, inverse, zero, scale, like)
                            norm += squares8(part, like)
                    errors[t] += error
                    norms[t] += norm
        for t in range(count):
            out[first + t] = np.sqrt(errors[t] / norms[t]) if norms[t] > 0 else np.float32(0.0)


@compiled
def residual(team, threads, shares, items, *arguments):
    """Writes e^V of all tokens on a team of threads."""
    return share(team, threads, shares, items, _loop, arguments)
