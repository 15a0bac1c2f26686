"""A scheduler half without an engine: tests play vLLM's scheduler and the worker, and look at every order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from agentcache.config import ConnectorConfig
from agentcache.engine.durable import DurableTier
from agentcache.engine.orders import Demoted, LoadOrder, LoadReport, Staged, StepOrders, StepReport, Stored
from agentcache.engine.scheduler_half import SchedulerHalf
from agentcache.engine.wire import KEY, Recovery
from agentcache.store.extents import LoadExtent
from agentcache.store.tiers import KVStore
from agentcache.store.tiers import Stored as Put
from agentcache.types import Run, complement, merge_runs

__all__ = ["BLOCK", "FINGERPRINT", "ROW_BYTES", "Desk"]

BLOCK = 32
ROW_BYTES = 64
FINGERPRINT = {"model": "m", "dtype": "bfloat16"}


class Desk:
    """One scheduler half. All fetches and saves of its worker succeed, unless a test says what is lost.

    Args:
        store: Below memory; closed with the desk.
        ranks: Of the worker.
        host_bytes: Budget of the index.
    """

    def __init__(self, store: KVStore | None = None, *, ranks: int = 1, host_bytes: int = 1 << 30) -> None:
        self.store = store
        self.ranks = ranks
        self.each = range(ranks)
        self.half = SchedulerHalf(
            ConnectorConfig(host_bytes=host_bytes),
            block_size=BLOCK,
            bytes_per_token=ROW_BYTES,
            max_step_tokens=1024,
            local_hit=lambda _: 0,
            open_tier=None if store is None else lambda index: DurableTier(store, index, FINGERPRINT, ranks),
        )
        self.losing = 0
        """How many objects of each fetch are lost."""
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._names = count()

    def close(self) -> None:
        self.half.close()

    def request(self, ids: Sequence[int], payload: Any) -> Request:
        """Returns vLLM's request for one token."""
        request = Request(
            request_id=f"r{next(self._names)}",
            prompt_token_ids=list(ids),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        request.kv_transfer_params = {KEY: payload}
        return request

    def step(self) -> StepOrders:
        """Runs one step of an idle engine; the worker does at once what it is told."""
        orders = self.half.orders(0)
        report = StepReport()
        for stage in orders.stage:
            lost = frozenset(object_id for object_id, *_ in stage.objects[: self.losing])
            report.staged[stage.number] = Staged(self.ranks, lost)
        for demotion in orders.demote:
            assert self.store is not None
            made = [
                self.store.put(demotion.ticket, key, r, bytes(99)) for _, key in demotion.objects for r in self.each
            ]
            report.demoted[demotion.ticket] = Demoted(self.ranks, not all(isinstance(m, Put) for m in made))
        for load in orders.loads:
            copied = [Run(e.position, e.position + e.length) for e in load.extents]
            stop = len(load.token_ids)
            assert merge_runs([*copied, *load.recompute]) == (Run(load.start, stop),), "every row, and no other"
            assert load.recompute == list(complement(copied, stop, load.start)), "no row twice"
            for extent in load.extents:
                assert self._is_right(load, extent), "rows of other tokens"
            report.loads[load.request_id] = LoadReport()
        for save in orders.saves:
            report.saved.add(save.request_id)
            report.stored |= {o.object_id: Stored((o.stop - o.start) * ROW_BYTES, "exact", True) for o in save.objects}
        self.half.on_report(report)
        return orders

    def _is_right(self, load: LoadOrder, extent: LoadExtent) -> bool:
        """Whether the rows that are copied are the parent's of the same tokens."""
        parent = self.half._requests[load.request_id].parent
        assert parent is not None
        want = load.token_ids[extent.position : extent.position + extent.length]
        starts = [e.position + extent.offset - e.offset for e in parent.extents if e.object_id == extent.object_id]
        return any(parent.token_ids[at : at + extent.length].tolist() == want for at in starts if at >= 0)

    def serve(self, ids: Sequence[int], payload: Any) -> Recovery:
        """Runs a request as vLLM's scheduler does; returns its report."""
        request = self.request(ids, payload)
        half = self.half
        half.on_new_request(request)
        for _ in range(1000):
            external, _ = half.matched_tokens(request, 0)
            if external is not None:
                break
            self.step()
        else:
            raise AssertionError("the request waits for ever")
        assert 0 <= external < len(ids)
        blocks = list(range(1, 2 + len(ids) // BLOCK))
        half.after_alloc(request, blocks, external)
        self.step()
        request.num_computed_tokens = len(ids)
        request.append_output_token_ids([7])
        _, report = half.request_finished(request, blocks)
        assert report is not None
        return Recovery.model_validate(report[KEY])

    def drain(self) -> None:
        """Steps until nothing is open."""
        for _ in range(1000):
            if not self.half.busy:
                return
            self.step()
        raise AssertionError("the engine steps for ever")

    def check(self) -> None:
        """Asserts that an idle half holds nothing that it should not."""
        assert not (self.half._requests or self.half._running or self.half.saves.open or self.half._resumes._seeking)
        self.half.index.check_integrity()
        assert self.half.index.stats()["pinned_bytes"] == 0
