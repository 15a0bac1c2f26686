"""The scheduler half's open saves: a finished request becomes a version, its new rows an order to the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.config import ConnectorConfig
from agentcache.engine.orders import SaveOrder
from agentcache.engine.state import RequestState
from agentcache.engine.wire import ResumeParams
from agentcache.store.index import CheckpointIndex, Refusal, Version

if TYPE_CHECKING:
    from agentcache.engine.durable import DurableTier

__all__ = ["Saves"]


class Saves:
    """Begins and ends saves.

    Args:
        config: The connector's settings.
        index: Where versions are registered.
        tier: Is offered what was committed; None when there is none.
        block_size: Tokens a block.

    Attributes:
        open: Versions in state `saving` by request.
    """

    def __init__(
        self, config: ConnectorConfig, index: CheckpointIndex, tier: DurableTier | None, block_size: int
    ) -> None:
        self.config, self.index, self.tier, self.block_size = config, index, tier, block_size
        self.open: dict[str, Version] = {}

    def begin(self, request: Any, state: RequestState, params: ResumeParams, block_ids: list[int]) -> SaveOrder | None:
        """Returns the order to gather a finished request's new rows; None when there is nothing to gather, or it is not saved.

        Args:
            request: vLLM's.
            state: What is known of it; its report says what becomes of the save.
            params: Its place in its episode.
            block_ids: Its block table.
        """
        # The last sampled token has no KV yet, nor have tokens of a step in flight.
        computed = min(
            request.num_computed_tokens - request.num_in_flight_tokens,
            request.num_tokens - 1,
            len(block_ids) * self.block_size,
        )
        if computed < request.num_prompt_tokens:
            return None  # aborted in its prefill, or preempted
        plan = state.plan
        approximate = state.first_approximate
        saved = self.index.begin_save(
            version_id=params.version,
            namespace=params.namespace,
            group=params.group,
            parent=state.parent if plan is not None else None,
            token_ids=np.asarray(request.all_token_ids[:computed], dtype=np.int32),
            computed=computed,
            plan_restore=state.kept() if plan is not None else (),
            exact_end=computed if approximate is None else approximate,
            salts=state.salts if approximate is not None else (),
            composed_of=state.composition.alive if state.composition is not None else (),
        )
        if isinstance(saved, Refusal):
            state.recovery.saved = "refused"
            state.recovery.reason = state.recovery.reason or saved.reason
            return None
        state.recovery.saved = "pending"
        if not saved.new:
            self._keep(saved.version, committed=self.index.commit(saved.version))
            return None
        self.open[request.request_id] = saved.version
        return SaveOrder(
            request_id=request.request_id,
            block_ids=list(block_ids),
            objects=[*saved.new],
            precision=params.precision or self.config.precision,
            token_ids=list(request.all_token_ids[:computed]),
            prompt_tokens=request.num_prompt_tokens,
            attention=self.config.attention,
        )

    def end(self, request_id: str, attention: bytes | None, *, ok: bool) -> bool:
        """Commits a save that ended well, forgets one that did not; returns whether it was open.

        Args:
            request_id: vLLM's id.
            attention: What the save measured, codes of `store.scores`.
            ok: Whether all ranks stored all of it.
        """
        version = self.open.pop(request_id, None)
        if version is None:
            return False  # another rank has failed before this one was done
        if ok:
            codes = None if attention is None else np.frombuffer(attention, dtype=np.uint8)
            self._keep(version, committed=self.index.commit(version, codes))
        else:
            self.index.abort_save(version)
        return True

    def _keep(self, version: Version, *, committed: bool) -> None:
        """Offers a version that was committed to the tier below."""
        if committed and self.tier is not None:
            self.tier.save(version)
