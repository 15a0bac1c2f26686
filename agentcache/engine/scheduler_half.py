"""The connector's scheduler half: the life of each request, the orders of each step, and the checkpoint index.

```
on_new_request          parse -> refuse or plan (`resumes`)
matched_tokens          how many rows we provide beyond vLLM's own hit; None while what they come from is still being saved
after_alloc             blocks are known: build the load order (again after a preemption)
orders                  hand the step's orders to the workers
on_report               saves committed, objects lost, loads timed
request_finished        register the version and order its save
```
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from typing import Any

from agentcache.config import ConnectorConfig
from agentcache.engine.costs import CostModel, Limits
from agentcache.engine.durable import DurableTier
from agentcache.engine.loads import online_order, plan_load
from agentcache.engine.orders import LoadOrder, StepOrders, StepReport
from agentcache.engine.planning import refusal
from agentcache.engine.resumes import Resumes
from agentcache.engine.saves import Saves
from agentcache.engine.state import RequestState
from agentcache.engine.step_clock import StepClock
from agentcache.engine.wire import ENDED, KEY, Recovery, parse_params
from agentcache.labels import NOTHING, format_labels, overlay
from agentcache.store.index import CheckpointIndex
from agentcache.types import clip_runs, run_tokens

__all__ = ["SchedulerHalf"]


class SchedulerHalf:
    """The scheduler process's half.

    Args:
        config: The connector's settings.
        block_size: Tokens a hashed block.
        bytes_per_token: Bytes of one row over all layers and ranks.
        max_step_tokens: The engine's token budget a step.
        max_runs: Its most requests in one step.
        local_hit: Returns how many leading tokens of a request vLLM's own prefix cache holds now.
        open_tier: Opens the durable tier below an index; None when there is none.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        block_size: int,
        bytes_per_token: int,
        max_step_tokens: int,
        max_runs: int = 64,
        local_hit: Callable[[Any], int],
        open_tier: Callable[[CheckpointIndex], DurableTier] | None = None,
    ) -> None:
        self.config = config
        self.block_size = block_size
        self.step_tokens = config.recompute_tokens_per_step or max_step_tokens
        self.costs = CostModel(Limits(max_step_tokens, self.step_tokens, max_runs))
        self.clock = StepClock(self.costs)
        self.index = CheckpointIndex(bytes_per_token=bytes_per_token, budget_bytes=config.memory_bytes)
        self.tier = open_tier(self.index) if open_tier is not None else None
        self.saves = Saves(config, self.index, self.tier, block_size)
        self._requests: dict[str, RequestState] = {}
        self._resumes = Resumes(self.index, self.tier, self.costs, local_hit, block_size)
        self._running: set[tuple[str, str]] = set()
        self._allocated: list[Any] = []
        self._promised = 0  # tokens that loads of the step being scheduled compute
        self._orders = StepOrders()
        self._news = False  # saves have ended since the workers were told how many are open

    # -- a request arrives ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Plans a request that opted in and salts its hashes; a request that did not is left as it is."""
        params, malformed = parse_params(request.kv_transfer_params)
        if params is None:
            if malformed is not None:
                self._requests[request.request_id] = RequestState(
                    None, Recovery(reason=malformed, prompt_tokens=request.num_prompt_tokens)
                )
            return
        recovery = Recovery(
            version=params.version,
            parent=params.parent,
            requested_policy=params.policy,
            prompt_tokens=request.num_prompt_tokens,
        )
        state = RequestState(params, recovery)
        self._requests[request.request_id] = state
        key = (params.namespace, params.version)
        double = key in self._running or self.index.lookup(*key) is not None
        state.owns_notes = not double
        recovery.reason = refusal(request)
        if recovery.reason is None and double:
            recovery.reason = f"version {params.version!r} exists already; a version is created once"
        if recovery.reason is not None:
            return
        self._running.add(key)
        state.owns_key = True
        state.save = params.save
        if params.names:
            self._resumes.plan(request, state, params, self._running)

    # -- a request is scheduled ----------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Returns how many rows beyond vLLM's own `local` hit this connector provides, and whether in the background."""
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        state.matched = local
        if self._resumes.seeks(request.request_id):
            return None, False
        if state.plan is None:
            return 0, False
        parent = state.parent
        assert parent is not None
        state.note_dropped()
        if parent.state == "dropped":
            state.give_up(local)
            return 0, False
        if parent.state == "saving":
            self._orders.hurry = True
            return None, False
        if state.sought_at is not None:
            state.recovery.fetch_ms = (time.perf_counter() - state.sought_at) * 1e3
            state.sought_at = None
        external = state.plan.load_end - local
        if external <= 0:
            return 0, False
        state.load = plan_load(self.index, state, local)
        state.load.background = self._in_background(request, state)
        return external, state.load.background

    def _in_background(self, request: Any, state: RequestState) -> bool:
        """Whether a load spreads over steps of its own instead of sharing one with the request's first chunk.

        vLLM fills the step up to its budget with the tokens after `load_end`. What we compute comes on top, and must not
        make the requests that decode beside it wait longer than chunked prefill would.
        """
        assert state.plan is not None and state.load is not None
        ours = run_tokens(state.load.recompute) + _most_online(state)
        rest = request.num_tokens - state.plan.load_end
        return ours > 0 and self._promised + ours + rest > self.step_tokens

    def after_alloc(self, request: Any, block_ids: list[int], external: int) -> None:
        """Orders the load of a request whose blocks were just allocated."""
        state = self._requests.get(request.request_id)
        if state is None or state.loading:
            return
        recovery = state.recovery
        recovery.local_tokens = min(state.matched, request.num_prompt_tokens)
        if external > 0:
            assert state.load is not None and state.plan is not None
            assert external == state.plan.load_end - state.load.start
            recovery.asynchronous = state.loading = state.load.background
            state.blocks = tuple(block_ids)
            self._allocated.append(request)
            if not state.loading:
                self._promised += run_tokens(state.load.recompute) + _most_online(state)
        elif state.plan is None:
            recovery.prefix_tokens = recovery.local_tokens
            recovery.new_tokens = request.num_prompt_tokens - recovery.local_tokens
        self._note(state, recovery.model_dump(mode="json"))

    def _note(self, state: RequestState, note: dict[str, Any]) -> None:
        """Keeps a report with the workers, unless the version is another request's."""
        if state.owns_notes:
            self._orders.notes[state.key] = note

    @property
    def has_loads(self) -> bool:
        """Whether a load was allocated in the step that is being scheduled."""
        return bool(self._allocated)

    def orders(
        self, scheduled_tokens: int, written: Set[int] = frozenset(), runs: Sequence[tuple[int, int]] = ()
    ) -> StepOrders:
        """Returns the step's orders and starts a new list.

        Args:
            scheduled_tokens: What vLLM computes in this step.
            written: Blocks that vLLM's own forward writes in this step; needed when there are loads.
            runs: Rows `[start, stop)` of each request that vLLM computes; none when the step is not to be timed.
        """
        for request in self._allocated:
            self._order_load(request, self._requests[request.request_id], written)
        self._allocated, self._promised = [], 0
        orders, self._orders = self._orders, StepOrders()
        orders.scheduled_tokens = scheduled_tokens
        tier = None
        if self.tier is not None:
            self.tier.poll(idle=not scheduled_tokens and not orders.loads and not self.saves.open)
            self._resumes.poll(self._running)
            self.tier.take_orders(orders)
            tier = self.tier.take_stats()
        orders.drop.extend(self.index.take_dropped())
        if orders.loads or orders.saves or orders.drop or orders.clear or tier is not None or self._news:
            orders.index = {**self.index.stats(), "open_saves": len(self.saves.open)}
            self._news = False
        if tier is not None:
            orders.tier = tier
        self._begin_step(orders, runs)
        return orders

    def _begin_step(self, orders: StepOrders, runs: Sequence[tuple[int, int]]) -> None:
        """Starts the clock on a step that can be estimated: vLLM's own work, beside at most one load that ends in it."""
        loading = any(state.loading for state in self._requests.values())
        if not runs or not self.costs.ready or loading or self.saves.open or len(orders.loads) > 1:
            self.clock.skip()
            return
        load = None
        for order in orders.loads:
            plan = self._requests[order.request_id].plan
            assert plan is not None
            rows = sum(extent.length for extent in order.extents)
            most = 0 if order.online is None else order.online.policy.most(order.online.context)
            load = plan.policy, self.costs.load_s(order.recompute, rows, len(order.extents), most)
        self.clock.begin(runs, load)

    def end_step(self) -> None:
        """Notes that a step's output is here."""
        self.clock.end()

    def _order_load(self, request: Any, state: RequestState, written: Set[int]) -> None:
        load, plan = state.load, state.plan
        assert load is not None and plan is not None
        # vLLM publishes a block when it is scheduled, so its hit may reach blocks that another request's prefill fills only
        # in this step, after our segment forward has read them. We fill those rows too, with the same values.
        first = next(
            (i for i, block in enumerate(state.blocks[: load.start // self.block_size]) if block in written), None
        )
        if first is not None:
            load = state.load = plan_load(self.index, state, first * self.block_size, background=load.background)
        planned = run_tokens(clip_runs(plan.recompute, load.start, plan.load_end))
        state.recovery.lost_tokens = run_tokens(load.recompute) - planned
        online = None
        if state.online is not None:
            online = online_order(state.online, load, request.prompt_token_ids)
            state.await_choice(online.rows, load.start)
        self._orders.loads.append(
            LoadOrder(
                request_id=request.request_id,
                key=state.key,
                token_ids=list(request.all_token_ids[: plan.load_end]),
                block_ids=list(state.blocks),
                start=load.start,
                extents=load.extents,
                recompute=list(load.recompute),
                background=load.background,
                online=online,
            )
        )

    # -- a step is done ------------------------------------------------------------------------------------------------

    def on_report(self, report: StepReport) -> set[int]:
        """Takes in a step's report; returns blocks whose hashes must be evicted because their load failed."""
        for request_id, load in report.loads.items():
            state = self._requests.get(request_id)
            if state is not None:
                state.note_load(load)
        if report.timings:
            self.costs.fit(report.timings)
        if report.lost:
            self.index.lose_objects(report.lost)
        for object_id, (size_bytes, tag, lossless) in report.stored.items():
            self.index.settle(object_id, size_bytes, tag, lossless=lossless)
        for request_id in report.saved | report.unsaved:
            ok = request_id in report.saved and request_id not in report.unsaved
            self._news |= self.saves.end(request_id, report.attention.get(request_id), ok=ok)
        for forgotten in report.forget:
            version = self.index.lookup(*forgotten)
            if version is not None:
                self.index.drop_version(version)
                self._news = True  # the workers hear of it, though no request runs
        for hint in report.hints:
            version = self.index.lookup(*hint)
            if version is not None:
                self.index.expect(version)
        if self.tier is not None:
            self.tier.on_report(report)
        evict: set[int] = set()
        for request_id, blocks in report.failed.items():
            # Also when the request was aborted meanwhile: its blocks are free, and vLLM has published them.
            evict |= blocks
            self._load_failed(request_id)
        return evict

    def _load_failed(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        if state is None:
            return
        state.loading = False
        if state.plan is not None:
            state.say("the restore failed in the worker; vLLM computed the rows (see its log)")
            state.give_up(state.matched)

    # -- a request ends ------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Registers the request's version; returns whether its blocks must stay for the gather, and its report."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        params, recovery = state.params, state.recovery
        self._resumes.forget(request.request_id)
        if state.owns_key:
            self._running.discard(state.key)
        if state.loading:
            self._orders.cancel.append(request.request_id)
        keep = False
        if state.save and not state.loading:
            assert params is not None
            order = self.saves.begin(request, state, params, block_ids)
            if order is not None:
                self._orders.saves.append(order)
            keep = order is not None
        self._label_rows(state)
        for version in state.composition.versions if state.composition is not None else ():
            self.index.unpin(version)
        note = recovery.model_dump(mode="json")
        self._note(state, {ENDED: note})
        return keep, {KEY: note}

    def _label_rows(self, state: RequestState) -> None:
        """Completes the report's labels of rows: it is known now what was chosen in the worker, and loaded."""
        recovery, length = state.recovery, state.recovery.prompt_tokens
        if state.plan is None:
            computed = recovery.prefix_tokens + recovery.new_tokens
            labels = [("P", 0, recovery.prefix_tokens), ("N", recovery.prefix_tokens, computed)]
            recovery.rows = format_labels(labels, length)
            return
        if recovery.restored_tokens or recovery.recomputed_tokens:  # the worker has told
            recovery.rows = overlay(recovery.rows, "R", state.repaired)
        if state.load is not None and state.composition is not None:
            blocks = (block for version in state.composition.alive for block in self.index.objects_of(version))
            tags = {block.object_id: block.tag for block in blocks}
            stored = ((tags.get(e.object_id, NOTHING), e.position, e.position + e.length) for e in state.load.extents)
            recovery.precisions = format_labels(stored, length)

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping for us: saves are open or orders wait."""
        ours = bool(self.saves.open or self._news or self._orders.cancel or self._orders.clear)
        return ours or (self.tier is not None and self.tier.busy)

    def reset(self) -> None:
        """Drops every checkpoint from memory; requests in flight are computed by vLLM. A durable tier keeps what it has."""
        self.index.clear()
        self.index.take_dropped()
        self._orders.clear = True

    def close(self) -> None:
        """Ends the threads of the tier below."""
        if self.tier is not None:
            self.tier.close()


def _most_online(state: RequestState) -> int:
    """Returns how many tokens a request's policy may choose in the worker."""
    if state.online is None:
        return 0
    assert state.online.policy is not None and state.online.context is not None
    return state.online.policy.most(state.online.context)
