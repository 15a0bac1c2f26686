"""The CPU implementation: loops that numba compiles, on a pool that follows torch's threads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from agentcache.kernels.backend import Backend, Setting
from agentcache.kernels.cpu_attention_mass import ROWS, mass_items
from agentcache.kernels.cpu_dequantize_scatter import scatter_items, scatter_scratch
from agentcache.kernels.cpu_plan import NO_TURN, Geometry, stretch_records
from agentcache.kernels.cpu_pool import Pool
from agentcache.kernels.cpu_quantize_gather import gather_items, gather_scratch
from agentcache.kernels.cpu_value_residual import residual_items
from agentcache.kernels.formats import BLOCK, Tag
from agentcache.kernels.packed import PackedRun, Piece, Source, shift_rows

__all__ = ["CpuBackend"]

_STRETCH = 2048  # most tokens an item: a long run is shared by several threads; a multiple of every group


class CpuBackend(Backend):
    """Runs the compiled loops. Compiles, or loads what it compiled before, when it is built.

    Args:
        setting: What to build for.
        cpus: Cores of the helper threads; None takes the engine's.
    """

    name = "numba"

    def __init__(self, setting: Setting, cpus: Iterable[int] | None = None) -> None:
        super().__init__(setting)
        self._geometry = Geometry.build(setting.layout, setting.layers, setting.dtype, setting.rotation)
        self._pool = Pool(cpus)
        self._row = setting.layout.shape[2], self._geometry.like.itemsize
        self._warm_up()

    def _warm_up(self) -> None:
        """Runs every loop once over nothing, so that no request waits for the compiler."""
        nothing, none = np.zeros(0, np.int64), stretch_records([])
        half = self._geometry.planes.shape[1]
        angles = np.zeros((1, half), np.float32)
        self._gather(0, 0, none, self._geometry.values, nothing, nothing)
        self._scatter(0, 0, none, self._geometry.values, nothing, nothing, angles, angles)
        queries = np.zeros((1, ROWS, self._row[0]), np.float32)
        self._mass(0, 0, 1, queries, np.zeros(ROWS, np.int64), 0, nothing, np.zeros((1, BLOCK), np.float32))
        self._residual(0, 0, 0, self._geometry.values, nothing, nothing, np.zeros(0, np.float32))

    def _gather(self, low, high, stretches, values, addresses, table):  # type: ignore[no-untyped-def]
        g = self._geometry
        scratch = np.zeros(gather_scratch(*self._row), np.uint8)
        gather_items(low, high, stretches, g.formats, values, addresses, table, g.k_cells, g.v_cells, scratch, g.like)

    def _scatter(self, low, high, stretches, values, addresses, table, cos, sin):  # type: ignore[no-untyped-def]
        g = self._geometry
        scratch = np.zeros(scatter_scratch(*self._row), np.uint8)
        pages, turn = (addresses, table, g.k_cells, g.v_cells), (cos, sin, g.planes)
        scatter_items(low, high, stretches, g.formats, values, *pages, *turn, scratch, g.like)

    def _mass(self, low, high, step, queries, limits, address, table, out):  # type: ignore[no-untyped-def]
        g = self._geometry
        dim, size = self._row
        scores, lines = np.empty((ROWS, out.shape[1]), np.float32), np.zeros(dim * BLOCK * size, np.uint8)
        mass_items(low, high, step, queries, limits, g.values, address, table, g.k_cells, out, scores, lines, g.like)

    def _residual(self, low, high, start, values, addresses, table, out):  # type: ignore[no-untyped-def]
        g, (dim, size) = self._geometry, self._row
        row = np.zeros(dim * size, np.uint8)
        residual_items(low, high, start, values, addresses, table, g.v_cells, out, row, g.like)

    def quantize_gather(
        self, pages: Sequence[torch.Tensor], table: torch.Tensor, sources: Sequence[Source]
    ) -> list[PackedRun]:
        """Returns the packed rows of each source."""
        runs, rows = [], []
        for start, length, name in sources:
            tag = Tag(name)
            form = self.setting.format(tag)
            data = torch.empty(form.run_bytes(length), dtype=torch.uint8)
            runs.append(PackedRun(name, length, data))
            for at in range(0, length, _STRETCH):
                count = min(_STRETCH, length - at)
                head = (data.data_ptr(), length, form.layer_bytes(length), tag.code)
                rows.append((*head, at, count, start + at, NO_TURN))
        stretches, addresses = stretch_records(rows), _addresses(pages)
        values, ids = self._geometry.for_pages(addresses), table.numpy()
        self._pool.run(
            lambda low, high: self._gather(low, high, stretches, values, addresses, ids), len(stretches) * len(pages)
        )
        return runs

    def dequantize_scatter(self, pieces: Sequence[Piece], pages: Sequence[torch.Tensor], table: torch.Tensor) -> None:
        """Writes pieces of packed runs into the pages."""
        cos, sin, angle_of = shift_rows(self.setting.rotation, pieces)
        rows = []
        for run, start, length, dst, shift in pieces:
            tag = Tag(run.tag)
            head = (run.data.data_ptr(), run.tokens, self.setting.format(tag).layer_bytes(run.tokens), tag.code)
            for at in range(0, length, _STRETCH):
                rows.append((*head, start + at, min(_STRETCH, length - at), dst + at, angle_of.get(shift, NO_TURN)))
        stretches, addresses = stretch_records(rows), _addresses(pages)
        values, ids, cosines, sines = self._geometry.for_pages(addresses), table.numpy(), cos.numpy(), sin.numpy()
        self._pool.run(
            lambda low, high: self._scatter(low, high, stretches, values, addresses, ids, cosines, sines),
            len(stretches) * len(pages),
        )

    def attention_mass(
        self,
        queries: torch.Tensor,
        positions: torch.Tensor,
        page: torch.Tensor,
        table: torch.Tensor,
        tokens: int,
        scale: float,
    ) -> torch.Tensor:
        """Returns the mean attention of queries on the keys of one layer, float32 `[tokens]`."""
        count, query_heads, dim = queries.shape
        heads = self.setting.layout.shape[0]
        per_head = query_heads // heads
        rows = count * per_head
        padded = -(-rows // ROWS) * ROWS
        scaled = torch.zeros(heads, padded, dim)
        grouped = queries.float().view(count, heads, per_head, dim).transpose(0, 1).reshape(heads, rows, dim)
        torch.mul(grouped, scale * math.log2(math.e), out=scaled[:, :rows])
        limits = torch.zeros(padded, dtype=torch.int64)
        limits[:rows] = (positions + 1).clamp(max=tokens).repeat_interleave(per_head)

        items = heads * padded // ROWS
        step = -(-items // (4 * torch.get_num_threads()))
        out = torch.zeros(-(-items // step), -(-tokens // BLOCK) * BLOCK)
        arrays = scaled.numpy(), limits.numpy(), page.data_ptr(), table.numpy(), out.numpy()
        query_rows, seen, address, ids, sums = arrays

        def loop(low: int, high: int) -> None:
            self._mass(low * step, min(high * step, items), step, query_rows, seen, address, ids, sums)

        self._pool.run(loop, len(out))
        return out.sum(0)[:tokens] / (count * query_heads)

    def value_residual(
        self, pages: Sequence[torch.Tensor], table: torch.Tensor, start: int, length: int
    ) -> torch.Tensor:
        """Returns what 4-bit values would leave of each token, float32 `[length]`."""
        out = torch.empty(length)
        addresses = _addresses(pages)
        values, ids, sums = self._geometry.for_pages(addresses), table.numpy(), out.numpy()
        self._pool.run(lambda low, high: self._residual(low, high, start, values, addresses, ids, sums), length)
        return out


def _addresses(pages: Sequence[torch.Tensor]) -> np.ndarray:
    return np.array([page.data_ptr() for page in pages], np.int64)
