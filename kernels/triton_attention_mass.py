"""`attention_mass` on GPU: row statistics first, then each key tile sums its column over all query rows."""

from __future__ import annotations

import triton
import triton.language as tl

from agentcache.kernels.triton_common import row_offsets, row_pointers

__all__ = ["mass_kernel", "statistics_kernel"]


@triton.jit
def _logits(
    queries,
    rows,
    page_base,
    table,
    cells,
    head,
    positions,
    limits,
    tokens,
    page_tokens,
    page_stride,
    base,
    head_stride,
    token,
    dim,
    scale,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    K_TABLE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Returns logits `[rows, keys]` in units of log2 e, -inf where a row does not see a key."""
    live = positions < tokens
    source, cell_rows = row_pointers(
        page_base, table, positions, live, head, page_tokens, page_stride, base, head_stride, token, D, K_TABLE
    )
    logits = tl.zeros((ROWS, KEYS), tl.float32)
    for chunk in range(0, D, CHUNK):
        dims = chunk + tl.arange(0, CHUNK)
        query = tl.load(queries + rows[:, None] * D + dims[None, :], mask=(dims < D)[None, :], other=0.0)
        inside = (dims < D)[:, None] & live[None, :]
        at = row_offsets(cells, cell_rows[None, :], dims[:, None], inside, dim, K_TABLE)
        keys = tl.load(source[None, :] + at, mask=inside, other=0.0)
        logits = tl.dot(query.to(CAST), keys.to(CAST), logits, input_precision="tf32x3")
    logits *= scale
    return tl.where(positions[None, :] < limits[:, None], logits, float("-inf"))


@triton.jit
def statistics_kernel(
    queries,
    limits,
    page,
    table,
    cells,
    tops,
    sums,
    row_count,
    tokens,
    page_tokens,
    page_stride,
    base,
    head_stride,
    token,
    dim,
    scale,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    K_TABLE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Writes each query row's largest logit and its sum of exponentials. Grid: (row blocks, H); row_count is a multiple of ROWS."""
    head = tl.program_id(1).to(tl.int64)
    local = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = head * row_count + local
    limit = tl.load(limits + local)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, tokens, KEYS):
        positions = first + tl.arange(0, KEYS).to(tl.int64)
        logits = _logits(
            queries,
            rows,
            page,
            table,
            cells,
            head,
            positions,
            limit,
            tokens,
            page_tokens,
            page_stride,
            base,
            head_stride,
            token,
            dim,
            scale,
            D,
            CHUNK,
            ROWS,
            KEYS,
            K_TABLE,
            CAST,
        )
        new = tl.maximum(top, tl.max(logits, axis=1))
        # A row that sees nothing yet keeps -inf: its exponentials are taken from 0 so that none is NaN.
        floor = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(top - floor) + tl.sum(tl.exp2(logits - floor[:, None]), axis=1)
        top = new
    tl.store(tops + rows, top)
    tl.store(sums + rows, total)


@triton.jit
def mass_kernel(
    queries,
    limits,
    page,
    table,
    cells,
    tops,
    sums,
    out,
    row_count,
    tokens,
    page_tokens,
    page_stride,
    base,
    head_stride,
    token,
    dim,
    scale,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    K_TABLE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Writes the attention that all query rows of a head pay a tile of keys to `out` [H, T]. Grid: (key tiles, H)."""
    head = tl.program_id(1).to(tl.int64)
    positions = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    mass = tl.zeros((KEYS,), tl.float32)
    for first in range(0, row_count, ROWS):
        local = first + tl.arange(0, ROWS).to(tl.int64)
        rows = head * row_count + local
        limit = tl.load(limits + local)
        logits = _logits(
            queries,
            rows,
            page,
            table,
            cells,
            head,
            positions,
            limit,
            tokens,
            page_tokens,
            page_stride,
            base,
            head_stride,
            token,
            dim,
            scale,
            D,
            CHUNK,
            ROWS,
            KEYS,
            K_TABLE,
            CAST,
        )
        top = tl.load(tops + rows)
        total = tl.load(sums + rows)
        seen = total > 0.0
        weight = tl.exp2(logits - tl.where(seen, top, 0.0)[:, None]) / tl.where(seen, total, 1.0)[:, None]
        mass += tl.sum(tl.where(seen[:, None], weight, 0.0), axis=0)
    tl.store(out + head * tokens + positions, mass, mask=positions < tokens)
