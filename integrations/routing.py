"""Which episode a chat model's call belongs to, and which version it is recovered from: read off the framework's metadata.

LangGraph runs an agent on a *thread*; its graphs and subgraphs are told apart by a checkpoint *namespace*, whose last segment is
the node. A thread and a namespace without that are one episode. No torch, no vLLM, no LangGraph.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Final
from uuid import UUID

from langchain_core.messages import BaseMessage

from agentcache.cache import AgentCache
from agentcache.engine.embedded import AsyncAgentCache
from agentcache.integrations.lines import Lines, Place
from agentcache.integrations.telemetry import annotate
from agentcache.reply import Reply

__all__ = ["CallContext", "Route", "Router", "current_call"]

logger = logging.getLogger(__name__)

_INTERNAL: Final = ("lc_source", "lc_internal_call")
"""Metadata of the calls that a middleware makes for itself: a summary, a choice of tools. They are no version of the prompt."""


@dataclass(eq=False)
class Route:
    """Where one model call goes.

    Attributes:
        episode: Id of its episode; None: the call belongs to none and is a plain, exact request.
        parent: The version to recover from; None: the episode's head.
        attributes: Kept with the version: thread, node, namespace and checkpoint.
        options: What a middleware or node wrapper asks for, e.g. `policy`; what the call itself says comes before it.
        reason: Why it belongs to no episode, or why `parent` is not the head.
        of_run: Whether the episode is that of a run without a thread: no earlier process can have begun it.
        version: Id of the version that the call created, once it has finished.
        message: The reply, once it has finished.
        router: That made it.
    """

    episode: str | None
    parent: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    of_run: bool = False
    version: str | None = None
    message: BaseMessage | None = None
    router: Router | None = field(default=None, repr=False)


@dataclass(eq=False)
class CallContext:
    """What a middleware or node wrapper asks of the model calls inside it, and what it hears of them.

    Attributes:
        options: Of each call, e.g. `{"policy": "edit_local"}`.
        episode: Id of their episode; None: as the framework's metadata say.
        routes: The calls of episodes that were made, in the order of their beginning.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    episode: str | None = None
    routes: list[Route] = field(default_factory=list)


current_call: ContextVar[CallContext | None] = ContextVar("agentcache_call", default=None)
"""Set around the model calls of a node; the threads and tasks that they run on inherit it."""


class Router:
    """Assigns the model calls of one cache to episodes. Thread-safe.

    A call's episode is that of its thread and namespace. Calls that run at the same time in one namespace (parallel
    sub-agents, tasks that were sent) have an episode each. A subgraph's namespace changes each turn: it goes on with the episode
    of the same thread and nodes that has the most text in common. A call without a thread goes on with the episode whose reply
    its messages hold, else it begins one.

    Args:
        cache: Its episodes are dropped when they are forgotten.
        most_runs: Episodes without a thread, and of one subgraph in one thread, that are kept; the oldest that has no open call is
            dropped.
    """

    def __init__(self, cache: AsyncAgentCache | None = None, *, most_runs: int = 256) -> None:
        self._cache = weakref.ref(cache) if cache is not None else None
        self._lines = Lines(most_runs)
        self._lock = RLock()

    @staticmethod
    def of(cache: AgentCache | AsyncAgentCache) -> Router:
        """Returns the router of a cache: all chat models and middlewares of one cache share it."""
        inner = cache._cache if isinstance(cache, AgentCache) else cache
        with _ROUTERS_LOCK:
            return _ROUTERS.setdefault(inner, Router(inner))

    @property
    def cache(self) -> AsyncAgentCache | None:
        """The cache; None once it is gone."""
        return self._cache() if self._cache is not None else None

    def route(
        self,
        messages: Sequence[BaseMessage],
        metadata: Mapping[str, Any] | None,
        run_id: UUID | str | None,
        *,
        episode: str | None = None,
        parent: str | None = None,
    ) -> Route:
        """Returns where a call goes; end it with `finished` or `failed`. Call it where the model is called.

        Args:
            messages: As the model got them.
            metadata: Of its run.
            run_id: Of its run.
            episode: Id that the caller gave; it is taken as it is.
            parent: Version that the caller gave; it is taken as it is.
        """
        known = metadata or {}
        place = Place.of(known)
        attributes = {**place.attributes(), "run_id": str(run_id)}
        source = next((f"{key}={known[key]}" for key in _INTERNAL if known.get(key)), None)
        call = current_call.get()
        if episode is None and source is not None:
            return Route(None, attributes=attributes, reason=f"a middleware's own call ({source})")
        given = episode if episode is not None else call.episode if call is not None else None
        route = Route(given, parent, attributes, dict(call.options) if call is not None else {}, router=self)
        if given is None:
            with self._lock:
                choice = self._lines.choose(place, messages, str(run_id))
                self._lines.begin(choice, route)
                retired = self._lines.retire()
            route.episode, route.of_run = choice.line.episode, place.thread is None
            if parent is None:
                route.parent, route.reason = choice.parent, choice.reason
            self._drop(retired)
        if call is not None:
            call.routes.append(route)
        return route

    def finished(self, route: Route, reply: Reply, message: BaseMessage, run_manager: Any = None) -> None:
        """Remembers the version that a call created, and writes its report to the run's metadata and to the current span.

        Args:
            route: What `route` has returned.
            reply: The engine's.
            message: The chat model's.
            run_manager: Of the call, for LangSmith's metadata.
        """
        self.ended(route, reply.version, message)
        annotate(route.episode, reply, run_manager)

    def ended(self, route: Route, version: str | None, message: BaseMessage) -> None:
        """Remembers the version that a call created.

        Args:
            route: What `route` has returned.
            version: Its id.
            message: The chat model's.
        """
        route.version, route.message = version, message
        self._end(route, version, message)

    def failed(self, route: Route, error: BaseException | None = None) -> None:
        """Ends a call that has no reply, for whatever reason."""
        if error is not None:
            route.reason = f"the call failed: {error!r}"
        self._end(route, None, None)

    def episodes(self, thread_id: str) -> tuple[str, ...]:
        """Returns the ids of a thread's episodes."""
        with self._lock:
            found: tuple[str, ...] = self._lines.episodes(str(thread_id))
        return found

    def waiting(self, thread_id: str) -> tuple[str, ...]:
        """Returns the ids of a thread's episodes that its interrupt holds up: those whose tool calls have no answer yet.

        Where there are none, its own episode, else the one that was called last.
        """
        with self._lock:
            found: tuple[str, ...] = self._lines.waiting(str(thread_id))
        return found

    def forget(self, thread_id: str) -> tuple[str, ...]:
        """Drops a thread's episodes, which frees their KV, and returns their ids.

        On the event loop of an `AsyncAgentCache` it only begins to; await `aforget` there.

        Raises:
            StoreError: The store below memory cannot be changed.
        """
        gone = self._forget(thread_id)
        futures = self._drop(gone)
        if futures and _running_loop() is not self._loop():
            for future in futures:
                future.result()
        return gone

    async def aforget(self, thread_id: str) -> tuple[str, ...]:
        """Drops a thread's episodes, which frees their KV, and returns their ids.

        Raises:
            StoreError: The store below memory cannot be changed.
        """
        gone = self._forget(thread_id)
        await asyncio.gather(*map(asyncio.wrap_future, self._drop(gone)))
        return gone

    def _end(self, route: Route, version: str | None, message: BaseMessage | None) -> None:
        """Ends a call; an episode that was forgotten before the engine knew of the call is dropped once more."""
        with self._lock:
            gone = self._lines.end(route, version, message)
        self._drop(gone)

    def _forget(self, thread_id: str) -> tuple[str, ...]:
        with self._lock:
            gone: tuple[str, ...] = self._lines.forget(str(thread_id))
        return gone

    def _loop(self) -> asyncio.AbstractEventLoop | None:
        cache = self.cache
        return cache._session.loop if cache is not None and cache.pids else None

    def _drop(self, episodes: Sequence[str]) -> list[Future[None]]:
        """Begins to drop episodes, on the cache's loop; without an engine there is no KV."""
        cache, loop = self.cache, self._loop()
        if cache is None or loop is None:
            return []
        futures = [asyncio.run_coroutine_threadsafe(cache.episode(episode).drop(), loop) for episode in episodes]
        for future in futures:
            future.add_done_callback(_log_failure)
        return futures


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("an episode was forgotten, but its KV was not freed: %s", error)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_ROUTERS: Final[weakref.WeakKeyDictionary[AsyncAgentCache, Router]] = weakref.WeakKeyDictionary()
_ROUTERS_LOCK: Final = RLock()
