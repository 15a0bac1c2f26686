"""`Kernels`: the four ops over paged KV, by an implementation that is chosen once."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterable, Sequence

import torch

from agentcache.kernels import reference
from agentcache.kernels.backend import Backend, Setting
from agentcache.kernels.comparison import COMPARISON
from agentcache.kernels.formats import PackedFormat, Tag
from agentcache.kernels.layout import PageLayout
from agentcache.kernels.packed import PackedRun, Piece, Rotation, Source

__all__ = ["IMPLEMENTATIONS", "Kernels"]

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "reference", "numba", "triton")


class Kernels:
    """Packs rows of paged KV, restores them elsewhere, and reads attention and residuals off the pages.

    Args:
        layout: Where K and V rows stand in a page, as probed.
        layers: L, one KV tensor each.
        dtype: The KV dtype: bfloat16, float16 or float32.
        rotation: How keys turn when they move; None refuses every shift.
        device: Where the pages are.
        implementation: `numba` (CPU), `triton` (GPU), `reference` (anywhere, slow), or `auto`: the fast one of the device.

    Attributes:
        implementation: The name of the chosen one.

    Raises:
        ValueError: An unknown name, or a dtype or head dim that no implementation packs.
        RuntimeError: The named implementation cannot run here; says why.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        layers: int,
        dtype: torch.dtype,
        rotation: Rotation | None = None,
        device: torch.device | str = "cpu",
        implementation: str = "auto",
    ) -> None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation={implementation!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype={dtype}: KV is packed from bfloat16, float16 or float32")
        if rotation is not None and not 0 < rotation.rotary_dim <= layout.shape[2]:
            raise ValueError(f"rotary_dim={rotation.rotary_dim} does not fit a head dim of {layout.shape[2]}")
        self.setting = Setting(layout, layers, dtype, torch.device(device), rotation)
        self.format(Tag.K8V4)  # refuses a head dim that cannot be packed
        self._backend = _build(self.setting, implementation)
        self.implementation = self._backend.name

    def format(self, tag: str) -> PackedFormat:
        """Returns the byte layout of runs of a tag."""
        return self.setting.format(Tag(tag))

    def quantize_gather(
        self, pages: Sequence[torch.Tensor], page_table: Sequence[int] | torch.Tensor, sources: Iterable[Source]
    ) -> list[PackedRun]:
        """Returns the rows of each source packed in its tag, in one pass over the pages.

        Args:
            pages: L KV tensors.
            page_table: Page of every block of positions.
            sources: Positions to pack. A tag may name a comparison format.

        Raises:
            ValueError: A source or page is out of range, a tag is unknown, or the pages do not fit the setting.
        """
        table, capacity = self._table(pages, page_table)
        sources = [Source(*source) for source in sources]
        for start, length, _ in sources:
            if start < 0 or length < 1 or start + length > capacity:
                raise ValueError(f"source [{start}, {start + length}) reaches out of a page table of {capacity} tokens")
        packed = iter(self._backend.quantize_gather(pages, table, [s for s in sources if s.tag not in COMPARISON]))
        return [self._compare(pages, table, s) if s.tag in COMPARISON else next(packed) for s in sources]

    def _compare(self, pages: Sequence[torch.Tensor], table: torch.Tensor, source: Source) -> PackedRun:
        k, v = reference.gather_rows(pages, self.setting.layout, table, source.start, source.length)
        return PackedRun(source.tag, source.length, COMPARISON[source.tag].pack(k, v))

    def dequantize_scatter(
        self, pieces: Iterable[Piece], pages: Sequence[torch.Tensor], page_table: Sequence[int] | torch.Tensor
    ) -> None:
        """Writes pieces of packed runs into the pages: dequantise, turn the keys by each piece's shift, round once, place.

        Every other cell keeps its value. Destinations of one call must be disjoint. On a GPU the call is enqueued on the
        current stream, and the runs' bytes must stay as they are until it is done.

        Args:
            pieces: What goes where.
            pages: L KV tensors, written in place.
            page_table: Page of every block of positions.

        Raises:
            ValueError: A piece or page is out of range, a tag is unknown, a shift has no rotation, or the pages do not fit.
        """
        table, capacity = self._table(pages, page_table)
        pieces = list(pieces)
        heads, _, dim = self.setting.layout.shape
        for run, start, length, dst, shift in pieces:
            if length < 1 or start < 0 or start + length > run.tokens:
                raise ValueError(f"piece [{start}, {start + length}) is no stretch of a run of {run.tokens} tokens")
            if dst < 0 or dst + length > capacity:
                raise ValueError(f"piece to [{dst}, {dst + length}) reaches out of a page table of {capacity} tokens")
            if shift and self.setting.rotation is None:
                raise ValueError(f"shift={shift}: these kernels were built without a rotation")
            if run.data.device != pages[0].device or run.data.dtype != torch.uint8 or not run.data.is_contiguous():
                raise ValueError(f"packed bytes must be contiguous uint8 on {pages[0].device}")
            if run.tag not in COMPARISON and run.data.numel() != self.format(run.tag).run_bytes(run.tokens):
                raise ValueError(
                    f"a {run.tag} run of {run.tokens} tokens has {self.format(run.tag).run_bytes(run.tokens)} bytes here, "
                    f"not {run.data.numel()}"
                )
        self._backend.dequantize_scatter([p for p in pieces if p.run.tag not in COMPARISON], pages, table)
        for run, start, length, dst, shift in (p for p in pieces if p.run.tag in COMPARISON):
            k, v = COMPARISON[run.tag].unpack(run.data, (len(pages), heads, run.tokens, dim), self.setting.dtype)
            k, v = (x[:, :, start : start + length] for x in (k, v))
            k = reference.rotate(k, self.setting.rotation, shift) if shift else k
            reference.scatter_rows(pages, self.setting.layout, table, dst, k, v)

    def attention_mass(
        self,
        queries: torch.Tensor,
        positions: torch.Tensor,
        page: torch.Tensor,
        page_table: Sequence[int] | torch.Tensor,
        tokens: int,
        scale: float,
    ) -> torch.Tensor:
        """Returns the mean attention of queries on each of the first `tokens` keys of one layer, float32 `[tokens]`.

        Args:
            queries: `[Q, Hq, D]`, rotated; Hq is a multiple of the KV heads.
            positions: int64 `[Q]`, from 0; a query sees the keys up to its own position.
            page: The layer's KV tensor.
            page_table: Page of every block of positions.
            tokens: T.
            scale: Factor of the logits.

        Raises:
            ValueError: Shapes do not fit, or a position is negative, or the page table is too short.
        """
        table, capacity = self._table([page], page_table)
        heads, _, dim = self.setting.layout.shape
        if queries.dim() != 3 or queries.shape[2] != dim or queries.shape[1] % heads or not len(queries):
            raise ValueError(f"queries {tuple(queries.shape)} are not [Q, a multiple of {heads}, {dim}]")
        if positions.shape != queries.shape[:1] or int(positions.min()) < 0:
            raise ValueError(f"positions must be {len(queries)} numbers from 0, got {positions.tolist()}")
        if not 1 <= tokens <= capacity:
            raise ValueError(f"tokens={tokens} reaches out of a page table of {capacity} tokens")
        return self._backend.attention_mass(queries, positions, page, table, tokens, scale)

    def value_residual(
        self, pages: Sequence[torch.Tensor], page_table: Sequence[int] | torch.Tensor, start: int, length: int
    ) -> torch.Tensor:
        """Returns e^V of PatchKV's risk (formulas 13): `‖V - V4‖ / ‖V‖` of each position over layers and heads, float32 `[N]`.

        Args:
            pages: L KV tensors.
            page_table: Page of every block of positions.
            start: First position.
            length: N.

        Raises:
            ValueError: The positions reach out of the page table.
        """
        table, capacity = self._table(pages, page_table)
        if start < 0 or length < 1 or start + length > capacity:
            raise ValueError(f"positions [{start}, {start + length}) reach out of a page table of {capacity} tokens")
        return self._backend.value_residual(pages, table, start, length)

    def _table(
        self, pages: Sequence[torch.Tensor], page_table: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Returns the page table as host int64 and how many tokens it covers, after checking that its pages exist."""
        setting = self.setting
        table = torch.as_tensor(page_table).to("cpu", torch.int64).contiguous()
        last = int(table.max()) if len(table) else 0
        need = last * setting.layout.page_stride + setting.layout.extent
        for page in pages:
            if page.dtype != setting.dtype or page.device.type != setting.device.type:
                raise ValueError(
                    f"these kernels were built for {setting.dtype} on {setting.device}, not {page.dtype} on {page.device}"
                )
            if page.untyped_storage().nbytes() // page.element_size() - page.storage_offset() < need:
                raise ValueError(f"page {last} lies outside a KV tensor of shape {tuple(page.shape)}")
        if len(table) and int(table.min()) < 0:
            raise ValueError(f"page {int(table.min())} is negative")
        return table, len(table) * setting.layout.shape[1]


def _build(setting: Setting, implementation: str) -> Backend:
    if implementation != "auto":
        return _load(setting, implementation)
    fast = "numba" if setting.device.type == "cpu" else "triton"
    try:
        backend = _load(setting, fast)
    except RuntimeError as error:
        _say_once(logging.WARNING, f"no {fast} kernels ({error}); the reference kernels are many times slower")
        return _load(setting, "reference")
    _say_once(logging.INFO, f"{fast} kernels on {setting.device}")
    return backend


@functools.cache
def _say_once(level: int, message: str) -> None:
    logger.log(level, message)


def _load(setting: Setting, implementation: str) -> Backend:
    if implementation == "reference":
        return importlib.import_module("agentcache.kernels.reference_backend").ReferenceBackend(setting)
    if implementation == "numba":
        if setting.device.type != "cpu":
            raise RuntimeError(f"the numba kernels run on cpu, not on {setting.device}")
        try:
            module = importlib.import_module("agentcache.kernels.cpu_backend")
        except ImportError as error:
            raise RuntimeError(f"numba cannot be imported ({error}); install numba") from error
        return module.CpuBackend(setting)
    try:
        module = importlib.import_module("agentcache.kernels.triton_backend")
    except ImportError as error:
        raise RuntimeError(f"triton cannot be imported ({error}); install triton") from error
    return module.TritonBackend(setting)
