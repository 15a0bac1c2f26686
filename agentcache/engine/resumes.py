"""Plans resumes: finds the versions that a request draws on, in memory or below, plans it and names its approximate blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from functools import cache
from typing import Any

from agentcache.engine.commits import lineage_salts, salt_request, version_salt
from agentcache.engine.costs import CostModel
from agentcache.engine.durable import DurableTier
from agentcache.engine.planning import Estimator, plan_request
from agentcache.engine.sources import complaint, draw_on, find_versions
from agentcache.engine.state import RequestState
from agentcache.engine.wire import ResumeParams
from agentcache.labels import label_plan
from agentcache.recovery.base import RecoveryPlan
from agentcache.store.compose import Composition
from agentcache.store.index import CheckpointIndex, Version

__all__ = ["Resumes"]


class Resumes:
    """Plans the requests that name a parent or sources.

    Args:
        index: Of the versions in memory; what a plan draws on is pinned there.
        tier: Below it, or None.
        costs: What a plan is estimated by.
        local_hit: Returns how many leading tokens of a request vLLM's own prefix cache holds now.
        block_size: Tokens a hashed block.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        tier: DurableTier | None,
        costs: CostModel,
        local_hit: Callable[[Any], int],
        block_size: int,
    ) -> None:
        self._index = index
        self._tier = tier
        self._costs = costs
        self._local_hit = local_hit
        self._block_size = block_size
        # Requests whose parent or sources are sought below memory.
        self._seeking: dict[str, tuple[Any, RequestState, ResumeParams]] = {}
        self._fetching: list[tuple[Version, float]] = []  # versions on their way up, and since when they are sought

    def plan(self, request: Any, state: RequestState, params: ResumeParams, running: Set[tuple[str, str]]) -> None:
        """Plans a request and salts its hashes, at once or when its parent and sources have been sought; see `seeks`.

        Args:
            request: vLLM's.
            state: Of it; gets the plan, or the reason why there is none.
            params: Of it.
            running: Keys of the versions whose requests run.
        """
        seek = None if self._tier is None else self._tier.seek
        found = find_versions(params, self._index.lookup, running, seek, state.searches)
        if state.searches and state.sought_at is None:
            state.sought_at = time.perf_counter()
        if found is None:
            self._seeking[request.request_id] = request, state, params
            return
        if any(search.version is not None for search in state.searches.values()):
            state.recovery.tier = "store"
        state.missed = complaint(params, found)
        state.recovery.lost_sources = [name for name in dict.fromkeys(params.sources) if isinstance(found[name], str)]
        state.say(None)
        started = time.perf_counter()
        composition = draw_on(request.prompt_token_ids, params, found)
        if composition is None:
            return
        base = composition.base
        exact_end = self._exact_end(request, base)
        estimate = self._estimator(request, composition)
        planned = plan_request(request.prompt_token_ids, composition, params, exact_end, estimate)
        plan, prefix = planned.plan, planned.prefix
        state.exact_end = min(exact_end, prefix)
        state.recovery.plan_ms = (time.perf_counter() - started) * 1e3
        state.recovery.estimate = planned.estimate
        state.say(planned.reason)
        if plan is None:
            return
        state.online = planned if planned.policy is not None else None
        state.plan, state.first_approximate = plan, plan.first_approximate
        state.composition = composition.used_by(plan.restore)
        for version in state.composition.versions:
            self._index.pin(version)
            self._index.touch(version)
        reused = plan.reused_tokens > 0
        state.salts = lineage_salts(
            base.salts,
            prefix=prefix,
            restored_after_prefix=reused,
            first_approximate=plan.first_approximate,
            block_size=self._block_size,
            own=version_salt(params.namespace, params.version, plan.digest, params.salt),
        )
        salt_request(request, state.salts)
        state.note_plan(plan)
        assert planned.context is not None
        state.recovery.rows = label_plan(plan, planned.context.diff)

    def poll(self, running: Set[tuple[str, str]]) -> None:
        """Plans the requests whose parents and sources are known now; learns from what has come up how fast the tier is.

        The blocks of a request that seeks are not hashed for a step before that.
        """
        self._end_fetches()
        for request_id, (request, state, params) in list(self._seeking.items()):
            if all(search.done for search in state.searches.values()):
                del self._seeking[request_id]
                assert state.sought_at is not None
                known = {version for version, _ in self._fetching}
                coming = (search.version for search in state.searches.values() if search.version not in known)
                self._fetching += ((v, state.sought_at) for v in coming if v is not None and v.state == "saving")
                self.plan(request, state, params, running)

    def _end_fetches(self) -> None:
        for version, since in self._fetching:
            if version.state == "committed":
                self._costs.observe_fetch(len(version.token_ids), time.perf_counter() - since)
        self._fetching = [(version, since) for version, since in self._fetching if version.state == "saving"]

    def seeks(self, request_id: str) -> bool:
        """Whether a request waits for what the tier below has of its parent and sources."""
        return request_id in self._seeking

    def forget(self, request_id: str) -> None:
        """Gives up a request's search; nothing is planned for it any more."""
        self._seeking.pop(request_id, None)

    def _estimator(self, request: Any, composition: Composition) -> Estimator | None:
        """Returns how long a request's first token takes by a plan, or None while nothing is known of this engine."""
        if not self._costs.ready:
            return None
        new_len, local = request.num_prompt_tokens, cache(lambda: self._local_hit(request))
        fetched = sum(len(version.token_ids) for version, _ in self._fetching if version in composition.versions)

        def estimate(plan: RecoveryPlan | None, online: int) -> float:
            if plan is None:
                return self._costs.estimate_exact(new_len, local())
            return self._costs.estimate_recovery(
                plan, new_len=new_len, local=local(), fetch_rows=fetched, online=online
            )

        return estimate

    def _exact_end(self, request: Any, parent: Version) -> int:
        """Returns how many of the parent's leading rows can be had exactly: stored so, or still in vLLM's own cache."""
        stored = self._index.trusted_end(parent)
        if stored == parent.exact_end:
            return stored
        return max(stored, min(self._local_hit(request), parent.exact_end))
