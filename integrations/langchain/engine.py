"""A cache, reachable from any thread and any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from agentcache.cache import AgentCache
from agentcache.engine.embedded import AsyncAgentCache
from agentcache.engine.episode import AsyncEpisode
from agentcache.errors import AgentCacheError, StoreError, UnknownVersionError
from agentcache.integrations.routing import Route
from agentcache.reply import Reply, StreamChunk

__all__ = ["EngineHandle"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineHandle:
    """Runs coroutines on the event loop that a cache's engine belongs to.

    Args:
        cache: A running cache; an `AsyncAgentCache` stays on the loop that it was started on.

    Attributes:
        cache: The asynchronous cache.

    Raises:
        AgentCacheError: It does not run.
    """

    def __init__(self, cache: AgentCache | AsyncAgentCache) -> None:
        self.cache = cache._cache if isinstance(cache, AgentCache) else cache
        if self.cache._session.engine is None:
            raise AgentCacheError("this cache has no engine: it was not started or is closed; call start()")
        self._store_failed = False

    # -- what is known of the model ------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.cache.tokenizer

    @property
    def model_config(self) -> Any:
        """The model's configuration in vLLM."""
        return self._engine().llm.model_config

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its reply."""
        return int(self.model_config.max_model_len)

    @property
    def grammar_waits(self) -> bool:
        """Whether the engine constrains a reply only after its reasoning."""
        return bool(self._engine().llm.vllm_config.structured_outputs_config.reasoning_parser)

    @property
    def grammar_backend(self) -> str:
        """What constrains replies."""
        return str(self._engine().llm.vllm_config.structured_outputs_config.backend)

    def kind(self, version: str | None) -> str | None:
        """Returns why a version differs from its parent; None where there is no such version any more."""
        if version is None:
            return None
        try:
            return str(self.cache._session.tracker.version(version).kind.value)
        except UnknownVersionError:
            return None

    def _engine(self) -> Any:
        engine = self.cache._session.engine
        if engine is None:
            raise AgentCacheError("this cache has no engine: it was not started or is closed; call start()")
        return engine

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, route: Route, chat: list[dict[str, Any]], options: Mapping[str, Any]) -> Reply:
        """Returns the reply to a prompt of an episode, or of none."""
        if route.episode is None:
            return await self.cache.generate(chat, **options)
        return await (await self._episode(route.episode, route.of_run)).generate(chat, **options)

    async def stream(
        self, route: Route, chat: list[dict[str, Any]], options: Mapping[str, Any]
    ) -> AsyncGenerator[StreamChunk, None]:
        """Yields the reply of `generate` token by token; closing the generator aborts it."""
        if route.episode is None:
            chunks = self.cache.stream(chat, **options)
        else:
            chunks = (await self._episode(route.episode, route.of_run)).stream(chat, **options)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _episode(self, episode: str, of_run: bool) -> AsyncEpisode:
        """Returns an episode, as an earlier process has left it where the cache has a store and that can be read."""
        session = self.cache._session
        if session.store is None or of_run or session.tracker.head(episode) is not None:
            return self.cache.episode(episode)
        try:
            opened = await self.cache.reopen(episode)
        except UnknownVersionError:
            opened = self.cache.episode(episode)  # it begins here
        except StoreError as error:
            # Told once until the store can be read again: each thread's first call comes by here.
            level = logging.DEBUG if self._store_failed else logging.WARNING
            logger.log(level, "episode %r begins anew, whatever an earlier process has left of it: %s", episode, error)
            self._store_failed = True
            return self.cache.episode(episode)
        self._store_failed = False
        return opened

    # -- threads and loops ---------------------------------------------------------------------------------------------

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns what a coroutine returns; an interrupt of the wait cancels it.

        Raises:
            AgentCacheError: This is the cache's own loop, which would wait for itself.
        """
        future, cancel = self._start(coroutine, wait=True)
        try:
            return future.result()
        finally:
            _end(future, cancel)

    async def acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns what a coroutine returns, from any loop; a cancelled wait cancels it."""
        if self._is_home():
            return await coroutine
        future, cancel = self._start(coroutine)
        ended = asyncio.Event()
        wake = _caller_of(ended.set)
        future.add_done_callback(lambda _: wake())
        try:
            await ended.wait()
            return future.result()
        finally:
            if not future.done():
                cancel()

    def iterate(self, chunks: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yields what an asynchronous generator yields; closing this one closes that one."""
        items: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        future, cancel = self._start(_pump(chunks, lambda chunk: items.put((chunk,))), wait=True)
        future.add_done_callback(lambda _: items.put(None))
        try:
            while (item := items.get()) is not None:
                yield item[0]
            future.result()
        finally:
            _end(future, cancel)

    async def aiterate(self, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yields what an asynchronous generator of the cache's loop yields, on any loop; closing this one closes that one."""
        if self._is_home():
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
            return
        items: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
        put = _caller_of(items.put_nowait)
        future, cancel = self._start(_pump(chunks, lambda chunk: put((chunk,))))
        future.add_done_callback(lambda _: put(None))
        try:
            while (item := await items.get()) is not None:
                yield item[0]
            future.result()
        finally:
            if not future.done():
                cancel()

    def _is_home(self) -> bool:
        return asyncio.get_running_loop() is self.cache._session.loop

    def _start(
        self, coroutine: Coroutine[Any, Any, T], *, wait: bool = False
    ) -> tuple[Future[T], Callable[[], object]]:
        """Starts a coroutine on the cache's loop; returns the future of its end, whichever it is, and what cancels it."""
        loop = self.cache._session.loop
        if loop is None or loop.is_closed() or not loop.is_running():
            coroutine.close()
            raise AgentCacheError("this cache is closed, or the event loop that it was started on has ended")
        if wait and _running_loop() is loop:
            coroutine.close()
            raise AgentCacheError(
                "a synchronous call on the event loop of the cache would wait for itself; use ainvoke or astream, or an AgentCache"
            )
        future: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def finish(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                future.set_exception(CancelledError())
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        def begin() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(finish)

        loop.call_soon_threadsafe(begin)
        return future, lambda: loop.call_soon_threadsafe(lambda: tasks[0].cancel())


def _end(future: Future[Any], cancel: Callable[[], object]) -> None:
    """Ends a call whose caller waits no longer, and waits until it has."""
    if not future.done():
        cancel()
        wait([future])


async def _pump(chunks: AsyncGenerator[T, None], put: Callable[[T], object]) -> None:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            put(chunk)


def _caller_of(function: Callable[..., object]) -> Callable[..., None]:
    """Returns what calls a function on this loop, from any thread."""
    here = asyncio.get_running_loop()

    def call(*arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # this loop has ended, and nobody waits any more
            here.call_soon_threadsafe(function, *arguments)

    return call


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
