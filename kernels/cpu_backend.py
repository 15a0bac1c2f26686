"""The CPU implementation: loops that numba compiles, on torch's own threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from agentcache.kernels.backend import Backend, Setting
from agentcache.kernels.cpu_attention_mass import ROWS, mass
from agentcache.kernels.cpu_dequantize_scatter import scatter
from agentcache.kernels.cpu_plan import NO_TURN, Geometry, stretch_records
from agentcache.kernels.cpu_quantize_gather import gather
from agentcache.kernels.cpu_team import SHARES_PER_THREAD, team_address
from agentcache.kernels.cpu_value_residual import residual
from agentcache.kernels.formats import BLOCK, Tag
from agentcache.kernels.packed import PackedRun, Piece, Source, shift_rows

__all__ = ["CpuBackend"]

_SUMS_PER_THREAD = 4  # rows of attention that a thread adds up apart
_STRETCH = 2048  # most tokens an item: a long run is shared by several threads; a multiple of every group


class CpuBackend(Backend):
    """Runs the compiled loops. Compiles, or loads what it compiled before, when it is built."""

    name = "numba"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._geometry = Geometry.build(setting.layout, setting.layers, setting.dtype, setting.rotation)
        self._team = team_address()
        self._warm_up()

    def _warm_up(self) -> None:
        """Runs every loop once over nothing, so that no request waits for the compiler."""
        values, nothing, none = self._geometry.values, np.zeros(0, np.int64), stretch_records([])
        heads, _, dim = self.setting.layout.shape
        angles = np.zeros((1, self._geometry.planes.shape[1]), np.float32)
        self._gather(0, none, values, nothing, nothing)
        self._scatter(0, none, values, nothing, nothing, angles, angles)
        queries, out = np.zeros((heads, ROWS, dim), np.float32), np.zeros((1, BLOCK), np.float32)
        self._mass(0, 1, queries, np.zeros(ROWS, np.int64), 0, nothing, out)
        self._residual(0, 0, values, nothing, nothing, np.zeros(0, np.float32))

    def _share(self, loop: Callable[..., bool], items: int, *arguments: Any) -> None:
        shares = min(items, SHARES_PER_THREAD * torch.get_num_threads())
        if not loop(self._team, torch.get_num_threads() if shares > 1 else 1, shares, items, *arguments):
            raise MemoryError("a CPU kernel found no memory for its scratch")

    def _gather(self, items, stretches, values, addresses, table):  # type: ignore[no-untyped-def]
        g = self._geometry
        self._share(gather, items, stretches, g.formats, values, addresses, table, g.k_cells, g.v_cells, g.like)

    def _scatter(self, items, stretches, values, addresses, table, cos, sin):  # type: ignore[no-untyped-def]
        g = self._geometry
        pages, turn = (addresses, table, g.k_cells, g.v_cells), (cos, sin, g.planes)
        self._share(scatter, items, stretches, g.formats, values, *pages, *turn, g.like)

    def _mass(self, items, step, queries, limits, address, table, out):  # type: ignore[no-untyped-def]
        g = self._geometry
        self._share(mass, items, step, queries, limits, g.values, address, table, g.k_cells, out, g.like)

    def _residual(self, items, start, values, addresses, table, out):  # type: ignore[no-untyped-def]
        g = self._geometry
        self._share(residual, items, start, values, addresses, table, g.v_cells, out, g.like)

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
        self._gather(len(stretches) * len(pages), stretches, values, addresses, ids)
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
        self._scatter(len(stretches) * len(pages), stretches, values, addresses, ids, cosines, sines)

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
        step = -(-items // (_SUMS_PER_THREAD * torch.get_num_threads()))
        out = torch.zeros(-(-items // step), -(-tokens // BLOCK) * BLOCK)
        self._mass(len(out), step, scaled.numpy(), limits.numpy(), page.data_ptr(), table.numpy(), out.numpy())
        return out.sum(0)[:tokens] / (count * query_heads)

    def value_residual(
        self, pages: Sequence[torch.Tensor], table: torch.Tensor, start: int, length: int
    ) -> torch.Tensor:
        """Returns what 4-bit values would leave of each token, float32 `[length]`."""
        out = torch.empty(length)
        addresses = _addresses(pages)
        values = self._geometry.for_pages(addresses)
        self._residual(-(-length // BLOCK), start, values, addresses, table.numpy(), out.numpy())
        return out


def _addresses(pages: Sequence[torch.Tensor]) -> np.ndarray:
    return np.array([page.data_ptr() for page in pages], np.int64)
