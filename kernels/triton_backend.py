"""The GPU implementation: tile records built on the host, one copy to the device and one launch for each kind of piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from agentcache.kernels.backend import Backend, Setting
from agentcache.kernels.formats import BLOCK, PackedFormat, Tag, value_groups
from agentcache.kernels.layout import Strides
from agentcache.kernels.packed import PackedRun, Piece, Source, shift_rows
from agentcache.kernels.triton_attention_mass import mass_kernel, statistics_kernel
from agentcache.kernels.triton_common import TILE_COLUMNS
from agentcache.kernels.triton_dequantize_scatter import scatter_kernel
from agentcache.kernels.triton_quantize_gather import gather_kernel
from agentcache.kernels.triton_value_residual import residual_kernel

__all__ = ["TritonBackend", "kernel_options"]

_ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_CHUNK = 32  # dimensions that a program holds at a time
_MASS_ROWS, _MASS_KEYS, _RESIDUAL_TOKENS = 16, 64, 32


def _pow2(n: int) -> int:
    return triton.next_power_of_2(n) if n else 0


def kernel_options(kernel: Any, tables: tuple[bool, bool]) -> dict[str, Any]:
    """Returns launch options: warps by which no variant spills on sm_90, and no fused multiply-add.

    Without it the results are those of `reference.py`, bit for bit, and memory decides the speed anyway. The registers that
    the warps leave are granted by name: of itself the assembler saves some, and spills.
    """
    warps = 8
    if kernel in (statistics_kernel, mass_kernel):
        warps = 4
    elif kernel is scatter_kernel and any(tables):
        warps = 16
    return {"num_warps": warps, "maxnreg": min(255, 65536 // (32 * warps)), "enable_fp_fusion": False}


def scatter_constants(
    tag: Tag, head_dim: int, rotary_dim: int, *, interleaved: bool, tables: tuple[bool, bool], element: tl.dtype
) -> dict[str, Any]:
    """Returns the compile-time arguments of `scatter_kernel`; rotary_dim 0 leaves the keys as they are."""
    return {
        "D": head_dim,
        "HALF": rotary_dim // 2,
        "CHUNK": _CHUNK,
        "GROUPS": value_groups(head_dim),
        "TAG": tag.code,
        "INTERLEAVED": interleaved and rotary_dim > 0,
        "K_TABLE": tables[0],
        "V_TABLE": tables[1],
        "DTYPE": element,
    }


def gather_constants(form: PackedFormat, tables: tuple[bool, bool], element: tl.dtype) -> dict[str, Any]:
    """Returns the compile-time arguments of `gather_kernel`."""
    groups = value_groups(form.head_dim)
    parts = max(groups, 2) if form.tag is Tag.K8V4 else groups
    return {
        "D": form.head_dim,
        "CHUNK": _CHUNK,
        "WIDTH_POW": _pow2(form.head_dim // parts),
        "GROUPS": groups,
        "TOKEN_BYTES": form.token_bytes,
        "SCALE_BYTES": form.scale_bytes,
        "TAG": form.tag.code,
        "K_TABLE": tables[0],
        "V_TABLE": tables[1],
        "DTYPE": element,
    }


def mass_constants(head_dim: int, table: bool, cast: tl.dtype) -> dict[str, Any]:
    """Returns the compile-time arguments of `statistics_kernel` and `mass_kernel`."""
    return {
        "D": head_dim,
        "CHUNK": _CHUNK,
        "ROWS": _MASS_ROWS,
        "KEYS": _MASS_KEYS,
        "K_TABLE": table,
        "CAST": cast,
    }


def residual_constants(head_dim: int, table: bool, element: tl.dtype) -> dict[str, Any]:
    """Returns the compile-time arguments of `residual_kernel`."""
    groups = value_groups(head_dim)
    return {
        "D": head_dim,
        "WIDTH_POW": _pow2(head_dim // groups),
        "GROUPS": groups,
        "TOKENS": _RESIDUAL_TOKENS,
        "V_TABLE": table,
        "DTYPE": element,
    }


class TritonBackend(Backend):
    """Launches the Triton kernels on the current stream.

    Raises:
        RuntimeError: There is no GPU, and the kernels are not interpreted.
    """

    name = "triton"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        interpreted = not isinstance(scatter_kernel, triton.runtime.JITFunction)
        if not interpreted and setting.device.type != "cuda":
            raise RuntimeError(f"the triton kernels run on cuda, not on {setting.device}")
        layout = setting.layout
        self._element = _ELEMENTS[setting.dtype]
        self._tables = layout.k_strides is None, layout.v_strides is None
        none = Strides(0, 0, 0, 0)
        self._strides = (*(layout.k_strides or none), *(layout.v_strides or none))
        self._cells = [layout.k_cells.to(setting.device), layout.v_cells.to(setting.device)]
        self._interpreted = interpreted

    def _launch(self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        with torch.device(self.setting.device):
            options = {} if self._interpreted else kernel_options(kernel, self._tables)
            kernel[grid](*arguments, **constants, **options)

    def _upload(self, *arrays: torch.Tensor) -> list[torch.Tensor]:
        """Returns int64 host arrays on the device, by one copy."""
        joined = torch.cat([a.flatten() for a in arrays]).to(self.setting.device, non_blocking=True)
        parts = joined.split([a.numel() for a in arrays])
        return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]

    def quantize_gather(
        self, pages: Sequence[torch.Tensor], table: torch.Tensor, sources: Sequence[Source]
    ) -> list[PackedRun]:
        """Returns the packed rows of each source."""
        heads, page_tokens, _ = self.setting.layout.shape
        runs: list[PackedRun] = []
        tiles: dict[Tag, list[torch.Tensor]] = {}
        for start, length, name in sources:
            form = self.setting.format(Tag(name))
            data = torch.empty(form.run_bytes(length), dtype=torch.uint8, device=self.setting.device)
            runs.append(PackedRun(name, length, data))
            first = torch.arange(0, length, form.group_tokens)
            records = _records(form, data, length, first // BLOCK)
            records[:, 5] = (length - first).clamp(max=form.group_tokens)
            records[:, 8] = start + first
            tiles.setdefault(form.tag, []).append(records)
        for tag, parts in tiles.items():
            form = self.setting.format(tag)
            records, ids, addresses = self._upload(torch.cat(parts), table, _addresses(pages))
            arguments = (records, addresses, ids, *self._cells, page_tokens, self.setting.layout.page_stride)
            constants = gather_constants(form, self._tables, self._element)
            self._launch(gather_kernel, (len(records), heads, len(pages)), (*arguments, *self._strides), constants)
        return runs

    def dequantize_scatter(self, pieces: Sequence[Piece], pages: Sequence[torch.Tensor], table: torch.Tensor) -> None:
        """Writes pieces of packed runs into the pages."""
        heads, page_tokens, dim = self.setting.layout.shape
        rotation = self.setting.rotation
        cos, sin, angle_of = shift_rows(rotation, pieces)
        tiles: dict[tuple[Tag, bool], list[torch.Tensor]] = {}
        for run, start, length, dst, shift in pieces:
            form = self.setting.format(Tag(run.tag))
            block = torch.arange(start // BLOCK, (start + length - 1) // BLOCK + 1)
            records = _records(form, run.data, run.tokens, block)
            records[:, 5] = (run.tokens - block * BLOCK).clamp(max=BLOCK)
            records[:, 6] = (start - block * BLOCK).clamp(min=0)
            records[:, 7] = (start + length - block * BLOCK).clamp(max=BLOCK)
            records[:, 8] = dst - start + block * BLOCK
            records[:, 9] = angle_of.get(shift, 0)
            tiles.setdefault((form.tag, shift != 0), []).append(records)
        if not tiles:
            return
        cos, sin = cos.to(self.setting.device), sin.to(self.setting.device)
        for (tag, turned), parts in tiles.items():
            records, ids, addresses = self._upload(torch.cat(parts), table, _addresses(pages))
            arguments = (records, addresses, ids, cos, sin, *self._cells, page_tokens, self.setting.layout.page_stride)
            constants = scatter_constants(
                tag,
                dim,
                rotation.rotary_dim if rotation is not None and turned else 0,
                interleaved=rotation is not None and rotation.interleaved,
                tables=self._tables,
                element=self._element,
            )
            self._launch(scatter_kernel, (len(records), heads, len(pages)), (*arguments, *self._strides), constants)

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
        device, layout = self.setting.device, self.setting.layout
        count, query_heads, dim = queries.shape
        heads, page_tokens, _ = layout.shape
        per_head = query_heads // heads
        rows = count * per_head
        padded = triton.cdiv(rows, _MASS_ROWS) * _MASS_ROWS
        grouped = torch.zeros(heads, padded, dim, dtype=queries.dtype, device=device)
        grouped[:, :rows] = (
            queries.to(device).view(count, heads, per_head, dim).transpose(0, 1).reshape(heads, rows, dim)
        )
        limits = torch.zeros(padded, dtype=torch.int64, device=device)
        limits[:rows] = (positions.to(device) + 1).clamp(max=tokens).repeat_interleave(per_head)
        tops, sums = (torch.empty(heads, padded, device=device) for _ in range(2))
        out = torch.empty(heads, tokens, device=device)
        (ids,) = self._upload(table)
        # A dot product of the KV dtype only where the queries have it too: none is rounded for speed.
        cast = self._element if queries.dtype == self.setting.dtype else tl.float32
        first = (grouped, limits, page, ids, self._cells[0])
        last = (padded, tokens, page_tokens, layout.page_stride, *self._strides[:4], scale * math.log2(math.e))
        constants = mass_constants(dim, self._tables[0], cast)
        self._launch(statistics_kernel, (padded // _MASS_ROWS, heads), (*first, tops, sums, *last), constants)
        grid = (triton.cdiv(tokens, _MASS_KEYS), heads)
        self._launch(mass_kernel, grid, (*first, tops, sums, out, *last), constants)
        return out.sum(0) / (count * query_heads)

    def value_residual(
        self, pages: Sequence[torch.Tensor], table: torch.Tensor, start: int, length: int
    ) -> torch.Tensor:
        """Returns what 4-bit values would leave of each token, float32 `[length]`."""
        heads, page_tokens, dim = self.setting.layout.shape
        out = torch.empty(len(pages), heads, 2, length, device=self.setting.device)
        ids, addresses = self._upload(table, _addresses(pages))
        arguments = (addresses, ids, self._cells[1], out, start, length, page_tokens, self.setting.layout.page_stride)
        grid = (triton.cdiv(length, _RESIDUAL_TOKENS), heads, len(pages))
        constants = residual_constants(dim, self._tables[1], self._element)
        self._launch(residual_kernel, grid, (*arguments, *self._strides[4:]), constants)
        error, norm = out.sum((0, 1))
        return torch.where(norm > 0, (error / norm).sqrt(), 0.0)


def _records(form: PackedFormat, data: torch.Tensor, tokens: int, block: torch.Tensor) -> torch.Tensor:
    """Returns tile records `[n, 10]` of blocks of a run, with what `PackedFormat.block_span` says of their places."""
    per_group = form.group_tokens // BLOCK
    group, within = block // per_group, block % per_group
    group_tokens = (tokens - group * form.group_tokens).clamp(max=form.group_tokens)
    records = torch.zeros(len(block), TILE_COLUMNS, dtype=torch.int64)
    records[:, 0] = data.data_ptr()
    records[:, 1] = form.layer_bytes(tokens)
    records[:, 2] = group * form.kv_heads * form.group_bytes(form.group_tokens)
    records[:, 3] = form.scale_bytes + group_tokens * form.token_bytes
    records[:, 4] = form.scale_bytes + within * BLOCK * form.token_bytes
    return records


def _addresses(pages: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64)
