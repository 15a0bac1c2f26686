"""What the worker half needs of one rank: its pages, its rotation, its segment forward; every claim proved on construction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from agentcache.engine.pages import Pages, probe_layout
from agentcache.engine.rotary import KeyRotation, build_rotation
from agentcache.engine.segments import SegmentForward
from agentcache.engine.vllm_compat import attention_layers, rotary_modules
from agentcache.errors import SelfCheckError
from agentcache.store.extents import LoadExtent
from agentcache.store.payloads import PayloadStore

__all__ = ["Runtime"]


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
        self.pages = [self._pages(layers[name], kv_cache_config.num_blocks) for name in self.layer_names]
        self.rotation = self._rotation(model, vllm_config.model_config.dtype)
        self.segments = SegmentForward(model, vllm_config, self.layer_names, spec, first.get_attn_backend(), device)
        self.row_bytes = len(self.pages) * 2 * self.heads * self.head_dim * self.dtype.itemsize
        self._prove_rows()

    def _pages(self, layer: Any, num_blocks: int) -> Pages:
        cache = layer.kv_cache
        layout = probe_layout(
            layer,
            cache,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
        )
        return Pages(layer, cache, layout, num_blocks)

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
        """Writes rows at unaligned slots of the null block and reads them back; raises when they differ."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.block_size - 3, self.heads, self.head_dim)
        key, value = (torch.randn(shape, generator=generator).to(self.dtype).to(self.device) for _ in range(2))
        slots = torch.arange(1, self.block_size - 2, device=self.device)
        null = torch.zeros(1, dtype=torch.int64, device=self.device)
        for name, pages in zip(self.layer_names, self.pages, strict=True):
            pages.write(slots, key, value)
            got = pages.read(null, 1, self.block_size - 2)
            if not (torch.equal(got[0], key) and torch.equal(got[1], value)):
                raise SelfCheckError(f"rows written to the pages of {name} are not those that are read back")

    def gather(self, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns the rows `[start, stop)` of all layers on the host, `[L, 2, T, H, D]`, bit-identical to the pages."""
        rows = torch.empty((len(self.pages), 2, stop - start, self.heads, self.head_dim), dtype=self.dtype)
        blocks = block_ids.to(self.device)
        for layer, pages in enumerate(self.pages):
            rows[layer, 0], rows[layer, 1] = pages.read(blocks, start, stop)
        return rows

    def restore(self, store: PayloadStore, extents: Sequence[LoadExtent], block_ids: torch.Tensor) -> None:
        """Writes stored rows into a request's pages, keys rotated from their source position.

        Args:
            store: Holds every object that the extents name.
            extents: Rows to write.
            block_ids: int64 block table of the request.
        """
        if not extents:
            return
        ordered = sorted(extents, key=lambda e: e.shift)
        sources = []
        for extent in ordered:
            rows = store.get(extent.object_id)
            assert rows is not None
            sources.append(rows[:, :, extent.offset : extent.offset + extent.length])
        positions = torch.cat([torch.arange(e.position, e.position + e.length) for e in ordered])
        slots = (block_ids[positions // self.block_size] * self.block_size + positions % self.block_size).to(
            self.device
        )
        turns = []
        at = 0
        for shift, same in groupby(ordered, key=lambda e: e.shift):
            length = sum(e.length for e in same)
            if shift:
                turns.append((at, at + length, shift))
            at += length
        for layer, pages in enumerate(self.pages):
            key = torch.cat([rows[layer, 0] for rows in sources]).to(self.device)
            value = torch.cat([rows[layer, 1] for rows in sources]).to(self.device)
            for start, stop, shift in turns:
                key[start:stop] = self.rotation.rotate(key[start:stop], shift)
            pages.write(slots, key, value)

    def all_ranks(self, flags: Sequence[bool]) -> list[bool]:
        """Returns each flag's conjunction over the tensor-parallel ranks: they must run the same segments."""
        group = get_tp_group()
        if group.world_size == 1:
            return list(flags)
        missing = torch.tensor([float(not flag) for flag in flags], device=self.device)  # CPU sums floats only
        return [count == 0 for count in group.all_reduce(missing).tolist()]

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
            "rotary": f"{'interleaved' if self.rotation.interleaved else 'half-split'}, {self.rotation.rotary_dim} of {self.head_dim} dims",
            "row_bytes": self.row_bytes,
            "threads": torch.get_num_threads(),
        }
