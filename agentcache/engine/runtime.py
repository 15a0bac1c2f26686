"""What the worker half needs of one rank: its pages, its rotation, its segment forward; every claim proved on construction."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from agentcache.engine.attention_probe import AttentionProbe, Queries, query_layers, query_runs, sampled_layers
from agentcache.engine.pages import Pages, block_axis, probe_layout
from agentcache.engine.rotary import KeyRotation, build_rotation
from agentcache.engine.segments import Segment, SegmentForward
from agentcache.engine.vllm_compat import attention_layers, rotary_modules
from agentcache.errors import SelfCheckError
from agentcache.kernels import Kernels, PackedRun, PageLayout, Piece, Source, Tag
from agentcache.store.extents import LoadExtent
from agentcache.store.payloads import PayloadStore
from agentcache.types import Run

__all__ = ["Runtime"]

logger = logging.getLogger(__name__)

_PROBE_TOKEN = 5  # any ordinary token


class Runtime:
    """One rank's pages, rotation and segment forward.

    Args:
        model: The engine's model.
        vllm_config: The engine's configuration.
        kv_cache_config: Its KV groups; exactly one, of full attention.
        device: Where the model runs.

    Raises:
        SelfCheckError: A claim does not hold: page layout, rotation or row access.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, device: torch.device
    ) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        spec = group.kv_cache_spec
        if not isinstance(spec, FullAttentionSpec):
            raise SelfCheckError(f"the KV group is a {type(spec).__name__}, not full attention")
        self.device = device
        self.block_size = int(spec.block_size)
        self.layer_names = list(group.layer_names)
        layers = attention_layers(vllm_config, self.layer_names)
        first = layers[self.layer_names[0]]
        self.dtype: torch.dtype = first.kv_cache.dtype
        self.heads, self.head_dim = int(spec.num_kv_heads), int(spec.head_size)
        blocks = int(kv_cache_config.num_blocks)
        self.caches: list[torch.Tensor] = [layers[name].kv_cache for name in self.layer_names]
        self._block_axis = block_axis(self.caches[0], blocks)
        layout = self._layout(layers, blocks)
        self.pages = [Pages(layers[name], layers[name].kv_cache, layout, blocks) for name in self.layer_names]
        self.rotation = self._rotation(model, vllm_config.model_config.dtype)
        self.segments = SegmentForward(model, vllm_config, self.layer_names, spec, first.get_attn_backend(), device)
        self.kernels = Kernels(layout, layers=len(self.pages), dtype=self.dtype, rotation=self.rotation, device=device)
        self.row_bytes = len(self.pages) * 2 * self.heads * self.head_dim * self.dtype.itemsize
        self._prove_rows()
        self._prove_layers()
        self.sampled = sampled_layers(len(self.pages))
        self.query_layers = query_layers(len(self.pages))
        self._probe = AttentionProbe(self.segments, [layers[self.layer_names[i]] for i in self.sampled])
        self.probe_error = self._probe_fault()

    def _layout(self, layers: dict[str, Any], num_blocks: int) -> PageLayout:
        """Returns the one page layout of all layers."""
        found = [
            probe_layout(
                layer,
                layer.kv_cache,
                num_blocks=num_blocks,
                block_size=self.block_size,
                num_kv_heads=self.heads,
                head_dim=self.head_dim,
            )
            for layer in layers.values()
        ]
        first = found[0]
        for name, other in zip(layers, found, strict=True):
            same = torch.equal(first.k_cells, other.k_cells) and torch.equal(first.v_cells, other.v_cells)
            if not same or first.page_stride != other.page_stride:
                raise SelfCheckError(f"the pages of {name} are laid out differently from those of {next(iter(layers))}")
        return first

    def _rotation(self, model: torch.nn.Module, dtype: torch.dtype) -> KeyRotation:
        """Returns the model's one key rotation, proved on its own modules."""
        modules = rotary_modules(model)
        if not modules:
            raise SelfCheckError("the model has no rotary embedding that this release knows; its keys cannot be moved")
        rotations = [build_rotation(module, self.head_dim, dtype) for module in modules]
        if any(
            not torch.equal(r.inv_freq, rotations[0].inv_freq) or r.interleaved != rotations[0].interleaved
            for r in rotations
        ):
            raise SelfCheckError("the model's layers use different rotary embeddings")
        return rotations[0]

    def _prove_rows(self) -> None:
        """Compares, in the null block, the fused kernels with the backend's own writer bit by bit; raises when they differ."""
        generator = torch.Generator().manual_seed(0)
        count, shift = self.block_size - 3, 7
        shape = (count, self.heads, self.head_dim)
        key, value = (torch.randn(shape, generator=generator).to(self.dtype).to(self.device) for _ in range(2))
        slots = torch.arange(1, 1 + count, device=self.device)
        null = torch.zeros(1, dtype=torch.int64)

        def differ(key: torch.Tensor, what: str) -> None:
            for name, pages in zip(self.layer_names, self.pages, strict=True):
                got_key, got_value = pages.read(null.to(self.device), 1, 1 + count)
                if not (torch.equal(got_key, key) and torch.equal(got_value, value)):
                    raise SelfCheckError(f"{what} in the pages of {name} are not those that the backend writes")

        for pages in self.pages:
            pages.write(slots, key, value)
        differ(key, "rows that are read")
        store = PayloadStore()
        store.put(0, self.gather(null, 1, 1 + count))
        for turn in (0, shift):
            self.clear_null_block()
            self.restore(store, [LoadExtent(0, 0, count, 1, turn)], null)
            differ(self.rotation.rotate(key, turn), f"rows restored with a shift of {turn}")
        self.clear_null_block()

    def clear_null_block(self) -> None:
        """Zeroes the page that no request holds."""
        for cache in self.caches:
            torch.select(cache, self._block_axis, 0).zero_()

    def _prove_layers(self) -> None:
        """Compares every layer's key of one token at two positions; raises when the rotation does not lead from one to the other.

        A lone token attends to itself wherever it stands, so its keys differ by their rotation alone: a layer without rotary
        embedding, or with another one, is found here.
        """
        null, moved = torch.zeros(1, dtype=torch.int64), 61
        keys = []
        for position in (0, moved):
            self.segments.forward([Segment([_PROBE_TOKEN], null, 0, 1)], moved=position)
            keys.append(self.rows(null, 0, 1)[:, 0])
        tolerance = 1e-3 if self.dtype == torch.float32 else 5e-2
        for name, at, want in zip(self.layer_names, *keys, strict=True):
            error = (self.rotation.rotate(at, moved).float() - want.float()).abs().max() / want.float().abs().max()
            if float(error) > tolerance:
                raise SelfCheckError(f"the keys of {name} do not turn with their position as its rotary module says")
        self.clear_null_block()

    def _probe_fault(self) -> str | None:
        """Returns why attention cannot be measured here, None when a probe gives its queries and leaves the pages alone.

        A backend that took slot -1 for a place would write to the first or to the last page.
        """
        null = torch.zeros(1, dtype=torch.int64)
        self.segments.forward([Segment([_PROBE_TOKEN] * 3, null, 0, 3)])  # rows that attention can read
        ends = [torch.select(cache, self._block_axis, at) for cache in self.caches for at in (0, -1)]
        before = [end.clone() for end in ends]
        try:
            queries = self._probe.capture([_PROBE_TOKEN] * 3, null, [Run(1, 3)])
            kept = all(torch.equal(*(x.view(torch.uint8) for x in pair)) for pair in zip(before, ends, strict=True))
            if not kept:
                raise SelfCheckError("a forward with slots of -1 wrote to the pages")
            if (len(queries.layers), queries.positions.tolist()) != (len(self.sampled), [1, 2]):
                raise SelfCheckError(f"a probe of rows 1 and 2 read queries of {queries.positions.tolist()}")
        except Exception as error:
            logger.exception("agentcache cannot measure attention on this engine; `mixed` checkpoints stay exact")
            return f"{type(error).__name__}: {error}"
        finally:
            self.clear_null_block()
        return None

    def rows(self, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns the rows `[start, stop)` of all layers as the backend's own layout has them, `[L, 2, T, H, D]`."""
        return torch.stack([torch.stack(pages.read(block_ids.to(self.device), start, stop)) for pages in self.pages])

    def gather(self, block_ids: torch.Tensor, start: int, stop: int, tag: str = Tag.EXACT) -> list[PackedRun]:
        """Returns the rows `[start, stop)` of all layers packed on the host; `exact` is bit-identical to the pages.

        Args:
            block_ids: int64 block table of the request.
            start: First row.
            stop: Row after the last.
            tag: Precision, see `kernels.Tag`; rows that would take no less space packed than exact stay exact.
        """
        return self.gather_runs(block_ids, [Source(start, stop - start, tag)])

    def gather_runs(self, block_ids: torch.Tensor, sources: Iterable[Source]) -> list[PackedRun]:
        """Returns each source packed on the host, exact where its tag would save no space.

        Args:
            block_ids: int64 block table of the request.
            sources: Rows and their precision.
        """
        sources = list(sources)
        runs = self.kernels.quantize_gather(self.caches, block_ids, sources)
        vain = [
            i for i, run in enumerate(runs) if run.tag != Tag.EXACT and run.data.numel() >= run.tokens * self.row_bytes
        ]
        if vain:
            exact = [sources[i]._replace(tag=Tag.EXACT) for i in vain]
            for i, run in zip(vain, self.kernels.quantize_gather(self.caches, block_ids, exact), strict=True):
                runs[i] = run
        return [PackedRun(run.tag, run.tokens, run.data.cpu()) for run in runs]

    def queries(self, token_ids: Sequence[int], block_ids: torch.Tensor, prompt_tokens: int) -> Queries:
        """Returns the queries by which a request's attention is measured; runs the model, and writes no page.

        Args:
            token_ids: Ids of all rows.
            block_ids: int64 block table of the request.
            prompt_tokens: How many of them are the prompt.

        Raises:
            SelfCheckError: Attention cannot be measured on this engine.
        """
        if self.probe_error is not None:
            raise SelfCheckError(f"attention cannot be measured on this engine: {self.probe_error}")
        return self._probe.capture(token_ids, block_ids, query_runs(prompt_tokens, len(token_ids)))

    def attention_mass(self, queries: Queries, index: int, block_ids: torch.Tensor, tokens: int) -> torch.Tensor:
        """Returns the queries' mean attention on each row in one sampled layer, float32 `[tokens]` on the host.

        Args:
            queries: From `queries`.
            index: Of the sampled layer, in `sampled`.
            block_ids: int64 block table of the request.
            tokens: Rows.
        """
        return self.layer_mass(self.sampled[index], queries.layers[index], queries.positions, block_ids, tokens)

    def layer_mass(
        self, layer: int, queries: torch.Tensor, positions: torch.Tensor, block_ids: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Returns the queries' mean attention on each row of one layer, float32 `[tokens]` on the host.

        Args:
            layer: Of the model.
            queries: `[Q, Hq, D]`, rotated.
            positions: int64 `[Q]`, a query sees the rows up to its own position.
            block_ids: int64 block table of the request.
            tokens: Rows.
        """
        scale = float(self.pages[layer].layer.impl.scale)
        return self.kernels.attention_mass(queries, positions, self.caches[layer], block_ids, tokens, scale).cpu()

    def value_residual(self, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns e^V, what 4 bits would lose of the values of rows `[start, stop)`, float32 `[stop - start]` on the host."""
        return self.kernels.value_residual(self.caches, block_ids, start, stop - start).cpu()

    def restore(self, store: PayloadStore, extents: Sequence[LoadExtent], block_ids: torch.Tensor) -> None:
        """Writes stored rows into a request's pages: dequantised, keys rotated from their source position.

        Args:
            store: Holds every object that the extents name.
            extents: Rows to write.
            block_ids: int64 block table of the request.
        """
        moved: dict[int, tuple[PackedRun, ...]] = {}
        pieces: list[Piece] = []
        for extent in extents:
            if extent.object_id not in moved:
                payload = store.get(extent.object_id)
                assert payload is not None, f"object {extent.object_id} was checked and is gone"
                moved[extent.object_id] = tuple(
                    PackedRun(run.tag, run.tokens, run.data.to(self.device)) for run in payload.runs
                )
            pieces += _pieces(moved[extent.object_id], extent)
        if pieces:
            self.kernels.dequantize_scatter(pieces, self.caches, block_ids)

    def all_ranks(self, flags: Sequence[bool]) -> list[bool]:
        """Returns each flag's conjunction over the tensor-parallel ranks: they must run the same segments."""
        group = get_tp_group()
        if group.world_size == 1:
            return list(flags)
        missing = torch.tensor([float(not flag) for flag in flags], device=self.device)  # CPU sums floats only
        return [count == 0 for count in group.all_reduce(missing).tolist()]

    def mean_over_ranks(self, values: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """Returns the mean of what the tensor-parallel ranks measured, or None when one of them has nothing.

        Args:
            values: float32 `[rows]` on the host, or None when this rank could not measure.
            rows: How many there are on every rank.
        """
        group = get_tp_group()
        if group.world_size == 1:
            return values
        mine = torch.zeros(rows + 1)
        if values is None:
            mine[rows] = 1.0
        else:
            mine[:rows] = values
        total = group.all_reduce(mine.to(self.device)).cpu()
        return None if total[rows] else total[:rows] / group.world_size

    def describe(self) -> dict[str, Any]:
        """Returns what was found, for `doctor` and for benchmark JSON."""
        impl = self.pages[0].layer.impl
        layout = self.pages[0].layout
        return {
            "backend": type(impl).__name__,
            "isa": getattr(self.pages[0].layer, "isa", None),
            "layers": len(self.pages),
            "kv_heads": self.heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "key_layout": "strided" if layout.k_strides else "packed",
            "value_layout": "strided" if layout.v_strides else "packed",
            "kernels": self.kernels.implementation,
            "rotary": f"{'interleaved' if self.rotation.interleaved else 'half-split'}, {self.rotation.rotary_dim} of {self.head_dim} dims",
            "row_bytes": self.row_bytes,
            "attention_probe": self.probe_error or "ok",
            "threads": torch.get_num_threads(),
        }


def _pieces(runs: Sequence[PackedRun], extent: LoadExtent) -> Iterator[Piece]:
    """Yields the stretches of an object's runs that an extent covers."""
    first = 0
    for run in runs:
        low, high = max(extent.offset, first), min(extent.offset + extent.length, first + run.tokens)
        if high > low:
            yield Piece(run, low - first, high - low, extent.position + low - extent.offset, extent.shift)
        first += run.tokens
