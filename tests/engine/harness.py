"""Stock vLLM engines that tests step by hand, with the connector's two halves in reach.

The engine under test runs in this process (vLLM's in-process client and its `uni` executor): a step is a call, the scheduler
half and the worker half are objects that a test can look at or break, and a start takes two seconds instead of fifteen.
Everything else is vLLM as it ships. Only one such engine can live at a time. The reference engine has its worker in another
process, no connector and no prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.request import Request

from agentcache.engine.runtime import Runtime
from agentcache.engine.scheduler_half import SchedulerHalf
from agentcache.engine.segments import Segment
from agentcache.engine.wire import KEY, Recovery, ResumeParams
from agentcache.engine.worker_half import WorkerHalf
from agentcache.store.index import Version
from agentcache.types import AlignedRun
from tests.engine.reference import (
    BLOCK,
    NEW,
    OLD,
    Answer,
    Reference,
    assert_exact,
    differs,
    edit,
    lossy,
    start_llm,
    text,
)

__all__ = [
    "BLOCK",
    "NEW",
    "OLD",
    "Answer",
    "Engine",
    "Reference",
    "assert_exact",
    "differs",
    "edit",
    "first_version",
    "lossy",
    "row_error",
    "text",
]

CONNECTOR = {
    "kv_connector": "AgentCacheConnector",
    "kv_connector_module_path": "agentcache.engine.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
EXTENSION = "agentcache.engine.worker_extension.WorkerExtension"


class Engine:
    """One engine with the connector.

    Args:
        model: Model folder.
        blocks: KV blocks of the engine, the null block included.
        threads: Of torch; tiny models gain nothing from more, and a busy machine makes threads wait for each other.
        extra: The connector's settings.
        args: Further arguments of `vllm.LLM`.
    """

    def __init__(
        self, model: Path, *, blocks: int = 128, threads: int = 1, extra: dict[str, Any] | None = None, **args: Any
    ) -> None:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 16,
            "block_size": BLOCK,
            "distributed_executor_backend": "uni",
        }
        self.llm = start_llm(
            model,
            threads,
            num_gpu_blocks_override=blocks,
            worker_extension_cls=EXTENSION,
            kv_transfer_config=CONNECTOR | {"kv_connector_extra_config": extra or {}},
            **settings | args,
        )
        self.block = int((settings | args)["block_size"])
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        connector = self.scheduler.connector
        assert isinstance(connector.scheduler, SchedulerHalf)
        self.half: SchedulerHalf = connector.scheduler
        self.worker: WorkerHalf = get_kv_transfer_group().worker
        assert isinstance(self.worker, WorkerHalf)
        self.answers: dict[str, Answer] = {}
        self._preempted: dict[str, int] = {}
        self._ids = count()
        (report,) = self.llm.collective_rpc("agentcache_attach")
        assert report["ok"], report

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(
        self, ids: Sequence[int], params: ResumeParams | dict[str, Any] | None = None, n: int = 8, **sampling: Any
    ) -> Answer:
        """Queues a greedy request for `n` tokens; `params` may be any malformed dict."""
        if isinstance(params, ResumeParams):
            extra = params.to_extra_args()
        else:
            extra = None if params is None else {"kv_transfer_params": params}
        sampling_params = SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, extra_args=extra, **sampling
        )
        name = f"r{next(self._ids)}"
        request_id = self.engine.add_request(name, {"prompt_token_ids": list(ids)}, sampling_params)
        answer = self.answers[name] = Answer(request_id, list(ids), params)
        return answer

    def step(self) -> None:
        """Runs one engine step and takes in its outputs."""
        self._count_preemptions()
        for output in self.engine.step():
            answer = self.answers[output.request_id]
            answer.tokens = list(output.outputs[0].token_ids)
            answer.cached = output.num_cached_tokens or 0
            if output.finished:
                answer.done = True
                raw = (output.kv_transfer_params or {}).get(KEY)
                answer.recovery = None if raw is None else Recovery.model_validate(raw)
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        self._preempted |= {r.request_id: r.num_preemptions for r in self.scheduler.requests.values()}

    @property
    def preemptions(self) -> int:
        """How often requests lost their blocks since the engine was empty."""
        return sum(self._preempted.values())

    def preempt(self) -> None:
        """Takes the blocks of all running requests, as vLLM does when it runs out of them."""
        scheduler = self.scheduler
        while scheduler.running:
            scheduler._preempt_request(scheduler.running.pop(), time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.clear()

    def run(self, *answers: Answer, steps: int = 2000) -> None:
        """Steps until these requests are done, all when none is given."""
        for _ in range(steps):
            if all(a.done for a in answers or self.answers.values()):
                return
            self.step()
        raise AssertionError(f"not done after {steps} steps: {[a for a in self.answers.values() if not a.done]}")

    def drain(self, steps: int = 2000) -> None:
        """Steps until nothing is left to do, open saves included."""
        for _ in range(steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"the engine still has requests after {steps} steps: {list(self.scheduler.requests)}")

    def ask(self, ids: Sequence[int], params: Any = None, n: int = 8, **sampling: Any) -> Answer:
        """Runs one request to its end and its save too."""
        answer = self.add(ids, params, n, **sampling)
        self.run(answer)
        self.drain()
        return answer

    def abort(self, answer: Answer) -> None:
        """Cancels a request as a client that hangs up does."""
        self.engine.abort_request([answer.request_id], internal=True)
        answer.done = answer.aborted = True

    def status(self, answer: Answer) -> str:
        """Returns the name of the request's state in vLLM's scheduler."""
        request = self.scheduler.requests.get(answer.request_id)
        return "GONE" if request is None else request.status.name

    # -- state ---------------------------------------------------------------------------------------------------------

    def forget_local(self) -> None:
        """Empties vLLM's own prefix cache; checkpoints stay."""
        assert self.llm.reset_prefix_cache()

    def empty(self) -> None:
        """Ends everything and forgets everything, checkpoints too."""
        for answer in self.answers.values():
            if not answer.done:
                self.abort(answer)
        self.drain()
        assert self.llm.reset_prefix_cache(reset_connector=True)
        self.ask([5, 6, 7], n=1)  # the step in which the worker half hears of it
        self.forget_local()
        self.answers.clear()
        self._preempted.clear()

    def version(self, name: str, namespace: str = "default") -> Version | None:
        """Returns a version of the index."""
        return self.half.index.lookup(namespace, name)

    def check(self) -> None:
        """Asserts that an idle engine holds nothing that it should not."""
        assert not self.scheduler.requests
        assert not self.half._requests
        assert not self.half._running
        assert not self.half.saves.open
        self.half.index.check_integrity()
        assert not self.worker._background
        assert not self.worker.saver.pending
        assert all(
            block.ref_cnt == 0 for block in self.scheduler.kv_cache_manager.block_pool.blocks if not block.is_null
        )
        stats = self.half.index.stats()
        assert stats["pinned_bytes"] == 0
        # Objects that were dropped since the last step are still with the worker.
        waiting = set(self.half.index._objects.dropped)
        assert set(self.worker.store._objects) - waiting == set(self.half.index._objects)
        assert stats["bytes"] + stats["token_bytes"] <= stats["budget_bytes"]

    def _scratch(self, tokens: int) -> torch.Tensor:
        """Returns a block table at the end of the idle engine's KV; its hashes go first, so that nobody finds it."""
        pool = self.scheduler.kv_cache_manager.block_pool
        table = torch.arange(pool.num_gpu_blocks - -(-tokens // self.block), pool.num_gpu_blocks)
        assert all(pool.blocks[i].ref_cnt == 0 for i in table.tolist()), "the engine is not idle"
        pool.evict_blocks(set(table.tolist()))
        return table

    @property
    def runtime(self) -> Runtime:
        """The worker half's runtime."""
        assert self.worker.runtime is not None
        return self.worker.runtime

    @torch.inference_mode()
    def prefill_rows(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the rows of a full prefill `[L, 2, T, H, D]`; the engine is idle."""
        table = self._scratch(len(ids))
        self.runtime.segments.run([Segment(list(ids), table, 0, len(ids))])
        return self.runtime.rows(table, 0, len(ids))

    def public_blocks(self, ids: Sequence[int]) -> dict[int, int]:
        """Returns block index to block id of the cached blocks that a plain request with these tokens would find."""
        request = Request(
            request_id="probe",
            prompt_token_ids=list(ids),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self.core.request_block_hasher,
        )
        out = {}
        for index, block_hash in enumerate(request.block_hashes):
            found = self.scheduler.kv_cache_manager.block_pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            out[index] = found[0].block_id
        return out

    def audit(self, ids: Sequence[int]) -> tuple[int, float]:
        """Returns how many public blocks these tokens have, and their largest error against a full prefill."""
        blocks = self.public_blocks(ids)
        table = torch.tensor(list(blocks.values()), dtype=torch.int64)
        if not len(table):
            return 0, 0.0
        held = self.runtime.rows(table, 0, len(table) * self.block)
        return len(table), row_error(held, self.prefill_rows(ids[: len(table) * self.block]))

    @torch.inference_mode()
    def stored_error(self, version: Version, stop: int) -> float:
        """Returns the largest error of a version's rows `[0, stop)`, restored, against a full prefill."""
        if not stop:
            return 0.0
        want = self.prefill_rows(version.token_ids[:stop].tolist())
        table = self._scratch(stop)
        extents = self.half.index.load_plan(version, [AlignedRun(0, 0, stop)])
        self.runtime.restore(self.worker.store, extents, table)  # rows that are not stored keep the wanted values
        return row_error(self.runtime.rows(table, 0, stop), want)


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest wanted value of its layer and of keys or values."""
    size = want.abs().amax(dim=(2, 3, 4), keepdim=True)
    return float(((got - want).abs() / size).max())


def first_version(engine: Engine, name: str = "v1", ids: Sequence[int] = OLD, **more: Any) -> Answer:
    """Runs and saves a version without parent."""
    answer = engine.ask(ids, ResumeParams(version=name, **more))
    assert answer.recovery is not None
    assert answer.recovery.saved == "pending"
    version = engine.version(name, more.get("namespace", "default"))
    assert version is not None
    assert version.state == "committed"
    return answer
