"""The vLLM connector: a façade over the scheduler half and the worker half, one instance of each.

`--kv-transfer-config '{"kv_connector": "AgentCacheConnector", "kv_connector_module_path": "agentcache.engine.connector",
"kv_role": "kv_both"}'`. Requests opt in by `kv_transfer_params`, see `engine.wire`; all others are untouched.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backend import AttentionMetadata

from agentcache.config import ConnectorConfig
from agentcache.engine.child import collect_again
from agentcache.engine.durable import DurableTier
from agentcache.engine.fingerprint import fingerprint
from agentcache.engine.orders import StepOrders, StepReport
from agentcache.engine.scheduler_half import SchedulerHalf
from agentcache.engine.support import check_config, check_kv_cache_config
from agentcache.engine.worker_half import WorkerHalf
from agentcache.engine.worker_tier import WorkerTier
from agentcache.errors import ConfigError, UnsupportedModelError
from agentcache.store.index import CheckpointIndex
from agentcache.store.payloads import Payload
from agentcache.store.tiers import open_store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["AgentCacheConnector"]

logger = logging.getLogger(__name__)


class AgentCacheConnector(KVConnectorBase_V1):
    """Recovers the KV of edited prompts; see `docs/structure.md` for a request's life."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        collect_again()
        reasons = check_config(vllm_config) + check_kv_cache_config(kv_cache_config)
        if reasons:
            raise UnsupportedModelError(vllm_config.model_config.model, reasons)
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        try:
            config = ConnectorConfig.model_validate(extra)
        except ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config is not allowed: {error}") from error
        for module in config.policy_modules:
            importlib.import_module(module)
        self.worker: WorkerHalf | None = None
        self.scheduler: SchedulerHalf | None = None
        self._steps_overlap = bool(vllm_config.scheduler_config.async_scheduling)
        url = config.durable_url
        made_for = fingerprint(vllm_config, kv_cache_config) if url is not None else {}
        if role == KVConnectorRole.WORKER:
            self.worker = WorkerHalf(config, partial(_worker_tier, config, url, made_for) if url is not None else None)
        else:
            spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
            layers = len(kv_cache_config.kv_cache_groups[0].layer_names)
            ranks = int(vllm_config.parallel_config.tensor_parallel_size)
            self.scheduler = SchedulerHalf(
                config,
                block_size=int(getattr(kv_cache_config, "hash_block_size", None) or spec.block_size),
                # A row takes at most its exact bytes and a residual; how it was attended to is the version's.
                bytes_per_token=(spec.page_size_bytes // spec.block_size * layers + 1) * ranks,
                max_step_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
                max_runs=int(vllm_config.scheduler_config.max_num_seqs),
                local_hit=self._local_hit,
                open_tier=partial(_scheduler_tier, url, made_for, ranks) if url is not None else None,
            )

    def _local_hit(self, request: Request) -> int:
        assert self._kv_cache_manager is not None
        return int(self._kv_cache_manager.get_computed_blocks(request)[1])

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is a later miss, never a wrong answer."""
        return False

    # -- worker side ---------------------------------------------------------------------------------------------------

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Restores and recomputes the rows that this step's requests were promised."""
        assert self.worker is not None
        self.worker.start_load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end in `start_load_kv`."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Does nothing: finished requests are gathered after the step."""

    def wait_for_save(self) -> None:
        """Gathers rows of finished requests, a bounded number a step."""
        assert self.worker is not None
        self.worker.finish_step(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns requests whose gather ended and requests whose background load ended."""
        assert self.worker is not None
        return self.worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns blocks of loads that failed altogether; vLLM computes them and the scheduler half evicts their hashes."""
        assert self.worker is not None
        return self.worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns the step's report when there is something to tell."""
        assert self.worker is not None
        return self.worker.take_report()

    # -- scheduler side ------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Plans a request that opted in."""
        assert self.scheduler is not None
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many rows we provide beyond vLLM's own hit."""
        assert self.scheduler is not None
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Orders the load now that the blocks are known."""
        assert self.scheduler is not None
        self.scheduler.after_alloc(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns the step's orders."""
        assert self.scheduler is not None
        runs = _scheduled_runs(scheduler_output)
        written = self._written_blocks(runs) if self.scheduler.has_loads else frozenset()
        timed = [] if self._steps_overlap else [*runs.values()]
        return self.scheduler.orders(scheduler_output.total_num_scheduled_tokens, written, timed)

    def _written_blocks(self, runs: dict[str, tuple[int, int]]) -> Set[int]:
        """Returns the blocks that vLLM's own forward writes in this step."""
        manager = self._kv_cache_manager
        assert manager is not None and self.scheduler is not None
        size = self.scheduler.block_size
        written: set[int] = set()
        for request_id, (start, stop) in runs.items():
            written.update(manager.get_block_ids(request_id)[0][start // size : -(-stop // size)])
        return written

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes in the workers' reports."""
        assert self.scheduler is not None
        self.scheduler.end_step()
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            evict = self.scheduler.on_report(report)
            if evict:
                assert self._kv_cache_manager is not None
                self._kv_cache_manager.evict_blocks(evict)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Registers the version that the request created and orders its save."""
        assert self.scheduler is not None
        return self.scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping: saves are open."""
        return self.scheduler is not None and self.scheduler.busy

    def reset_cache(self) -> bool | None:
        """Drops every checkpoint."""
        assert self.scheduler is not None
        self.scheduler.reset()
        return True

    def shutdown(self) -> None:
        """Ends the threads of a durable tier, after what they have queued."""
        if self.worker is not None:
            self.worker.close()
        if self.scheduler is not None:
            self.scheduler.close()


def _scheduled_runs(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """Returns the rows `[start, stop)` of each request that vLLM computes in a step."""
    cached = output.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    scheduled = output.num_scheduled_tokens
    return {request_id: (start, start + scheduled[request_id]) for request_id, start in computed.items()}


def _scheduler_tier(url: str, made_for: dict[str, str], ranks: int, index: CheckpointIndex) -> DurableTier:
    return DurableTier(open_store(url, fingerprint=made_for), index, made_for, ranks)


def _worker_tier(
    config: ConnectorConfig, url: str, made_for: dict[str, str], is_sound: Callable[[Payload], bool]
) -> WorkerTier:
    return WorkerTier(
        open_store(url, fingerprint=made_for),
        get_tp_group().rank_in_group,
        verify=config.verify_checksums,
        warm_bytes=config.memory_bytes // 4,
        is_sound=is_sound,
    )
