"""Where K and V rows stand inside a backend's KV pages, learned by asking the backend itself.

CPU attention keeps K transposed inside each page, AMX packs it, GPU backends have layouts of their own. The backend's
writer `impl.do_kv_cache_update` is the reference: at start-up it writes a numbered pattern into vLLM's null block and
the cells are read back. A layout that is not a permutation is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from agentcache.errors import SelfCheckError
from agentcache.kernels import PageLayout, Strides

__all__ = ["Pages", "block_axis", "probe_layout"]

_BASE = 100  # digits of the pattern: exact in bfloat16, and never 0, which marks an untouched cell
_NULL_BLOCK = 0  # vLLM never stores a request's KV there


def block_axis(cache: torch.Tensor, num_blocks: int) -> int:
    """Returns the axis of a KV tensor that counts its pages."""
    axes = [i for i, n in enumerate(cache.shape) if n == num_blocks]
    if not axes:
        raise SelfCheckError(f"no axis of the KV cache {tuple(cache.shape)} has {num_blocks} blocks")
    return axes[0]


def probe_layout(
    layer: Any, cache: torch.Tensor, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> PageLayout:
    """Returns the page layout that the backend's own writer uses.

    Overwrites vLLM's null block, which holds nobody's KV.

    Args:
        layer: An attention layer; its `impl.do_kv_cache_update` is called.
        cache: The layer's KV tensor.
        num_blocks: Pages in the tensor.
        block_size: Tokens a page (B).
        num_kv_heads: H.
        head_dim: D.

    Raises:
        SelfCheckError: The written cells are no permutation of the rows.
    """
    axis = block_axis(cache, num_blocks)
    page = cache.select(axis, _NULL_BLOCK)
    shape = (block_size, num_kv_heads, head_dim)
    total = block_size * num_kv_heads * head_dim
    number = torch.arange(total, device=cache.device).view(shape)
    zeros = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
    slots = torch.arange(block_size, device=cache.device) + _NULL_BLOCK * block_size

    digits = 1
    while _BASE**digits < total:
        digits += 1

    def written(as_key: bool) -> torch.Tensor:
        """Writes the pattern digit by digit; returns each page cell's row number, -1 where nothing was written."""
        value = torch.zeros(page.shape, dtype=torch.int64, device=cache.device)
        touched = torch.zeros(page.shape, dtype=torch.bool, device=cache.device)
        for digit in range(digits):
            page.zero_()
            pattern = (number // _BASE**digit % _BASE + 1).to(cache.dtype)
            key, val = (pattern, zeros) if as_key else (zeros, pattern)
            layer.impl.do_kv_cache_update(layer, key, val, cache, slots)
            cell = page.float().round().long()
            touched = cell > 0
            value += (cell - 1).clamp(min=0) * _BASE**digit
        return torch.where(touched, value, -1)

    offsets = torch.zeros(page.shape, dtype=torch.int64, device=cache.device)
    for dim, (size, stride) in enumerate(zip(page.shape, page.stride(), strict=True)):
        view = [1] * page.dim()
        view[dim] = size
        offsets += (torch.arange(size, device=cache.device) * stride).view(view)
    # `select(axis, 0)` starts where the tensor starts, so offsets are relative to page 0.
    cells = []
    for as_key in (True, False):
        rows = written(as_key).flatten()
        where = (rows >= 0).nonzero().squeeze(1)
        order = rows[where]
        if len(where) != total or not torch.equal(order.sort().values, torch.arange(total, device=cache.device)):
            raise SelfCheckError(
                f"the {'key' if as_key else 'value'} page layout of {type(layer.impl).__name__} is not a permutation of its rows "
                f"({len(where)} of {total} cells written)"
            )
        table = torch.empty(total, dtype=torch.int64, device=cache.device)
        table[order] = offsets.flatten()[where]
        cells.append(table.view(shape).permute(1, 0, 2).contiguous())
    page.zero_()
    return PageLayout.from_cells(cache.stride(axis), *cells)


class Pages:
    """Row-wise access to one layer's KV pages.

    Args:
        layer: vLLM's attention layer.
        cache: Its KV tensor.
        layout: The probed layout.
        num_blocks: Pages in the tensor.
    """

    def __init__(self, layer: Any, cache: torch.Tensor, layout: PageLayout, num_blocks: int) -> None:
        self.layer = layer
        self.cache = cache
        self.layout = layout
        self._k = self._view(layout.k_strides, num_blocks)
        self._v = self._view(layout.v_strides, num_blocks)

    def _view(self, strides: Strides | None, num_blocks: int) -> torch.Tensor | None:
        """Returns the rows as a `[num_blocks, B, H, D]` view without a copy, when the layout is affine."""
        if strides is None:
            return None
        heads, block, dim = self.layout.shape
        base, head, token, element = strides
        return torch.as_strided(
            self.cache,
            (num_blocks, block, heads, dim),
            (self.layout.page_stride, token, head, element),
            self.cache.storage_offset() + base,
        )

    def read(self, block_ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns fresh copies of the K and V rows `[start, stop)` of a block table, each `[T, H, D]`.

        Args:
            block_ids: int64 block table of the request.
            start: First row.
            stop: Row after the last.
        """
        block = self.layout.shape[1]
        first, last = start // block, (stop + block - 1) // block
        ids = block_ids[first:last]
        out = []
        for view, cells in ((self._k, self.layout.k_cells), (self._v, self.layout.v_cells)):
            rows = view[ids] if view is not None else self._gather(ids, cells)
            rows = rows.reshape(-1, *rows.shape[2:])[start - first * block : stop - first * block]
            out.append(rows.contiguous())
        return out[0], out[1]

    def _gather(self, ids: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """Returns the rows of whole pages `[n, B, H, D]` through the permutation table."""
        offsets = cells.to(ids.device).permute(1, 0, 2)[None] + ids[:, None, None, None] * self.layout.page_stride
        storage = torch.as_strided(
            self.cache, (self.cache.untyped_storage().nbytes() // self.cache.element_size(),), (1,), 0
        )
        return storage[offsets + self.cache.storage_offset()]

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes rows at token slots with the backend's own writer.

        Args:
            slots: int64 `[T]`, block id times block size plus offset.
            key: `[T, H, D]`, already rotated to its position.
            value: `[T, H, D]`.
        """
        self.layer.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots)
