"""Segment forward: the one primitive. Any token runs of any requests go through vLLM's own model in one batch.

Run k of a request is a pseudo-request over the same block table with `query_len = stop - start` and `seq_len = stop`.
In each layer all K/V of the batch are written before attention reads, so a later run sees an earlier run's fresh rows
and every stale row between them. Nothing here knows a model: positions, slot mapping and metadata are all it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from agentcache.engine.vllm_compat import model_forward, most_runs

__all__ = ["Segment", "SegmentForward"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One run of one request.

    Attributes:
        token_ids: The request's ids; only those of the run are read.
        block_ids: int64 block table of the request.
        start: First row.
        stop: Row after the last.
    """

    token_ids: Sequence[int]
    block_ids: torch.Tensor
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def split(self, tokens: int) -> tuple[Segment, Segment]:
        """Returns the first `tokens` rows and the rest."""
        middle = self.start + tokens
        return (
            Segment(self.token_ids, self.block_ids, self.start, middle),
            Segment(self.token_ids, self.block_ids, middle, self.stop),
        )


class SegmentForward:
    """Runs segments through the engine's model, in place in its KV pages.

    Args:
        model: The engine's model.
        vllm_config: The engine's configuration.
        layer_names: Attention layers of the one KV group.
        kv_cache_spec: The group's spec.
        backend: The layers' attention backend class.
        device: Where the model runs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: VllmConfig,
        layer_names: list[str],
        kv_cache_spec: Any,
        backend: Any,
        device: torch.device,
    ) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.layer_names = layer_names
        self.block_size = int(kv_cache_spec.block_size)
        self.device = device
        self.max_runs = most_runs(backend, vllm_config)
        self.max_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        with set_current_vllm_config(vllm_config):
            # A private builder: the runner's own keeps state of the step in flight.
            self.builder = backend.get_builder_cls()(kv_cache_spec, layer_names, vllm_config, device)

    def batches(self, segments: Iterable[Segment]) -> Iterator[list[Segment]]:
        """Yields the segments in order, cut so that each batch keeps to the engine's run and token limits."""
        batch: list[Segment] = []
        room = self.max_tokens
        for segment in segments:
            rest = segment
            while len(rest):
                if not room or len(batch) == self.max_runs:
                    yield batch
                    batch, room = [], self.max_tokens
                head = rest
                if len(rest) > room:
                    head, rest = rest.split(room)
                else:
                    rest = rest.split(len(rest))[1]
                batch.append(head)
                room -= len(head)
        if batch:
            yield batch

    def run(self, segments: Iterable[Segment]) -> int:
        """Computes the segments and writes their K/V; returns how many tokens that were.

        Segments that read each other's rows must come in the order of that dependency: ascending within a request.
        """
        tokens = 0
        for batch in self.batches(segments):
            self.forward(batch)
            tokens += sum(map(len, batch))
        return tokens

    @torch.inference_mode()
    def forward(self, batch: Sequence[Segment], *, moved: int = 0, write: bool = True) -> torch.Tensor:
        """Computes one batch; returns its hidden states `[T, hidden]` in the order of the given segments.

        Args:
            batch: Runs within the engine's limits.
            moved: Added to the positions that the model sees, and to nothing else.
            write: Whether K/V are written. Without, every slot is -1, which backends skip, and the rows are read as the pages
                hold them.
        """
        # Backends that split decodes from prefills expect one-token runs first. Order within a batch is free: all rows of
        # a layer are written before any is read.
        order = sorted(range(len(batch)), key=lambda i: len(batch[i]))
        runs = [batch[i] for i in order]
        lengths = [len(run) for run in runs]
        stops = [run.stop for run in runs]
        token_ids = torch.tensor([t for run in runs for t in run.token_ids[run.start : run.stop]], dtype=torch.int32)
        positions = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        slots = torch.cat([self._slots(run) for run in runs]) if write else torch.full_like(positions, -1)
        blocks = max((stop + self.block_size - 1) // self.block_size for stop in stops)
        table = torch.zeros((len(runs), blocks), dtype=torch.int32)
        for row, run in enumerate(runs):
            used = run.block_ids[:blocks]
            table[row, : len(used)] = used
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor(stops, dtype=torch.int32)
        total = len(positions)
        to = self._to_device
        slots, positions = to(slots), to(positions + moved)
        metadata = self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=to(starts),
                query_start_loc_cpu=starts,
                seq_lens=to(seq_lens),
                num_reqs=len(runs),
                num_actual_tokens=total,
                max_query_len=max(lengths),
                max_seq_len=max(stops),
                block_table_tensor=to(table),
                slot_mapping=slots,
                positions=positions,
                is_prefilling=torch.ones(len(runs), dtype=torch.bool),
                seq_lens_cpu_upper_bound=seq_lens,
            ),
        )
        with set_forward_context(
            dict.fromkeys(self.layer_names, metadata),
            self.vllm_config,
            num_tokens=total,
            slot_mapping=dict.fromkeys(self.layer_names, slots),
            skip_compiled=True,
        ):
            hidden = model_forward(self.model, to(token_ids), positions)
        if order == list(range(len(batch))):
            return hidden
        pieces = hidden[:total].split(lengths)
        back = [pieces[order.index(i)] for i in range(len(batch))]
        return torch.cat(back)

    def _slots(self, run: Segment) -> torch.Tensor:
        at = torch.arange(run.start, run.stop)
        return run.block_ids[at // self.block_size] * self.block_size + at % self.block_size

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)
