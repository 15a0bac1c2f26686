"""`AgentCacheCallbackHandler`: a graph that is interrupted waits, perhaps for days; its episodes' KV may leave the engine."""

from __future__ import annotations

from threading import Lock
from typing import Any
from uuid import UUID

from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent, GraphResumeEvent

from agentcache.cache import AgentCache
from agentcache.engine.embedded import AsyncAgentCache
from agentcache.integrations.routing import Router

__all__ = ["AgentCacheCallbackHandler"]


class AgentCacheCallbackHandler(GraphCallbackHandler):
    """Pauses a thread's episodes at interrupts, and hints that they go on when the graph is resumed.

    `graph.invoke(..., {"configurable": {"thread_id": ...}, "callbacks": [AgentCacheCallbackHandler(cache)]})`. Thread-safe.

    Args:
        cache: The episodes'.
    """

    run_inline = True

    def __init__(self, cache: AgentCache | AsyncAgentCache) -> None:
        super().__init__()
        self._router = Router.of(cache)
        self._threads: dict[UUID, str] = {}
        self._lock = Lock()

    def on_chain_start(self, *_: Any, run_id: UUID, metadata: dict[str, Any] | None = None, **__: Any) -> None:
        """Remembers the thread of a graph's run: its interrupts name the run only."""
        thread = (metadata or {}).get("thread_id")
        if thread is not None:
            with self._lock:
                self._threads[run_id] = str(thread)

    def on_chain_end(self, *_: Any, run_id: UUID, **__: Any) -> None:
        """Forgets a run."""
        with self._lock:
            self._threads.pop(run_id, None)

    def on_chain_error(self, *_: Any, run_id: UUID, **__: Any) -> None:
        """Forgets a run."""
        with self._lock:
            self._threads.pop(run_id, None)

    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """Pauses what waits in the thread; the key is the interrupt's id."""
        for episode in self._waiting(event.run_id):
            for interrupt in event.interrupts:
                episode.pause(interrupt.id, reason="interrupt")

    def on_resume(self, event: GraphResumeEvent) -> None:
        """Hints that what waits in the thread goes on."""
        for episode in self._waiting(event.run_id):
            episode.resume_hint()

    def _waiting(self, run_id: UUID | None) -> list[Any]:
        cache = self._router.cache
        with self._lock:
            thread = self._threads.get(run_id) if run_id is not None else None
        if cache is None or thread is None:
            return []
        return [cache.episode(episode) for episode in self._router.waiting(thread)]
