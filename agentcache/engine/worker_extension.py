"""Methods that the embedded façade calls in every worker by `collective_rpc` (vLLM's `worker_extension_cls`)."""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from agentcache.engine.connector import AgentCacheConnector
from agentcache.engine.drift_probe import measure_drift
from agentcache.engine.profile_rpc import measure_pair
from agentcache.engine.runtime import Runtime
from agentcache.engine.selfcheck import check_recovery
from agentcache.engine.shift_probe import measure_shift
from agentcache.engine.worker_half import WorkerHalf
from agentcache.errors import AgentCacheError

__all__ = ["WorkerExtension"]

logger = logging.getLogger(__name__)


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` is the worker."""

    def _agentcache_half(self) -> WorkerHalf:
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, AgentCacheConnector) or connector.worker is None:
            raise RuntimeError("this engine runs without the agentcache connector")
        return connector.worker

    def agentcache_attach(self) -> dict[str, Any]:
        """Gives the connector the model and proves every claim about it; returns `{"ok", "reasons", ...}`."""
        half = self._agentcache_half()
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        try:
            runtime = Runtime(runner.get_model(), runner.vllm_config, runner.kv_cache_config, runner.device)
        except AgentCacheError as error:
            return {"ok": False, "reasons": [str(error)]}
        except Exception as error:  # whatever a backend or a model does not have is a reason, not a crash
            logger.exception("agentcache cannot use this engine")
            return {"ok": False, "reasons": [f"{type(error).__name__}: {error}"]}
        half.attach(runtime)
        return {"ok": True, "reasons": [], **runtime.describe()}

    def agentcache_check(self, old_ids: list[int], new_ids: list[int], prefix: int, suffix: int) -> dict[str, float]:
        """Returns the errors of a recovery against a full prefill, see `selfcheck`; the engine must be idle."""
        errors: dict[str, float] = check_recovery(*self._agentcache_pages(), old_ids, new_ids, prefix, suffix)
        return errors

    def agentcache_profile(self, old_ids: list[int], new_ids: list[int], wanted: dict[str, Any]) -> dict[str, Any]:
        """Returns what one pair of revisions shows, see `profile_rpc.measure_pair`; the engine must be idle."""
        measured: dict[str, Any] = measure_pair(*self._agentcache_pages(), old_ids, new_ids, **wanted)
        return measured

    def agentcache_drift(self, old_ids: list[int], new_ids: list[int]) -> dict[str, Any]:
        """Returns how similar stale rows are to exact ones, see `drift_probe`; the engine must be idle."""
        runtime, _, blocks = self._agentcache_pages()
        measured: dict[str, Any] = measure_drift(runtime, blocks, old_ids, new_ids)
        return measured

    def agentcache_shift(self, ids: list[int], chunks: list[list[int]], wanted: dict[str, Any]) -> dict[str, Any]:
        """Returns what the mean shift explains of reused chunks' errors, see `shift_probe`; the engine must be idle."""
        runtime, _, blocks = self._agentcache_pages()
        measured: dict[str, Any] = measure_shift(runtime, blocks, ids, chunks, **wanted)
        return measured

    def _agentcache_pages(self) -> tuple[Runtime, Any, int]:
        """Returns the runtime, the model and how many pages the KV cache has."""
        runtime = self._agentcache_half().runtime
        if runtime is None:
            raise RuntimeError("call agentcache_attach first")
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        return runtime, runner.get_model(), int(runner.kv_cache_config.num_blocks)

    def agentcache_report(self, namespace: str, version: str) -> dict[str, Any] | None:
        """Returns the report of a version so far, or None when it is not known here."""
        return self._agentcache_half().notes.get((namespace, version))

    def agentcache_stats(self) -> dict[str, Any]:
        """Returns this rank's counters."""
        return self._agentcache_half().stats()

    def agentcache_hint(self, namespace: str, version: str) -> None:
        """Notes that a version will be resumed soon."""
        self._agentcache_half().hint(namespace, version)

    def agentcache_drop(self, namespace: str, versions: list[str]) -> None:
        """Has versions dropped in the next step."""
        self._agentcache_half().forget(namespace, versions)
