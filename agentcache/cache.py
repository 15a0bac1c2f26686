"""`AgentCache` and `Episode`: the synchronous face. Each call runs on the cache's own event loop, in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar, Unpack

from agentcache.config import CacheConfig
from agentcache.engine.embedded import AsyncAgentCache
from agentcache.engine.episode import AsyncEpisode
from agentcache.episodes import Rendered
from agentcache.episodes.messages import Tool
from agentcache.errors import AgentCacheError
from agentcache.events import EventKind, Subscriber
from agentcache.guard import QualityGuard
from agentcache.reply import Reply, StreamChunk, VersionRecord
from agentcache.request import GenerateOptions, Messages

__all__ = ["AgentCache", "Episode"]

T = TypeVar("T")
_END_S: Final = 5.0


class _LoopThread:
    """An event loop on a thread of its own; calls from any thread wait for their end, also when they are interrupted."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentcache", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return self._thread.is_alive()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns what a coroutine returns. An interrupt of the wait cancels it, and waits until it has ended."""
        future, cancel = self._start(coroutine)
        try:
            return future.result()
        finally:
            if not future.done():
                cancel()
                wait([future])

    def iterate(self, chunks: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yields what an asynchronous generator yields; closing this one closes that one."""
        items: queue.SimpleQueue[T | None] = queue.SimpleQueue()

        async def pump() -> None:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    items.put(chunk)

        future, cancel = self._start(pump())
        future.add_done_callback(lambda _: items.put(None))
        try:
            while (item := items.get()) is not None:
                yield item
            future.result()
        finally:
            if not future.done():
                cancel()
                wait([future])

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> tuple[Future[T], Callable[[], object]]:
        """Starts a coroutine on the loop; returns the future of its end, whichever it is, and what cancels it."""
        if not self.alive:
            coroutine.close()
            raise AgentCacheError("this cache is closed; make a new one")
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
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(finish)

        self._loop.call_soon_threadsafe(begin)
        return future, lambda: self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

    def stop(self) -> None:
        """Ends the loop and its thread; open calls end first, those that do not are cancelled. Idempotent."""
        if self.alive:
            self.call(_end_tasks())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=_END_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Episode:
    """One agent's prompt through its versions; made by `AgentCache.episode`. See `AsyncEpisode`."""

    def __init__(self, episode: AsyncEpisode, thread: _LoopThread) -> None:
        self._episode = episode
        self._thread = thread

    @property
    def id(self) -> str:
        """Its id."""
        return self._episode.id

    @property
    def head(self) -> str | None:
        """Id of the newest version, or None."""
        return self._episode.head

    def generate(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Reply:
        """Returns the reply to a prompt, which becomes a new version; see `AsyncEpisode.generate`."""
        return self._thread.call(self._episode.generate(messages, **options))

    def stream(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Generator[StreamChunk, None, None]:
        """Yields the reply token by token; closing the generator aborts the request."""
        return self._thread.iterate(self._episode.stream(messages, **options))

    def history(self) -> list[VersionRecord]:
        """Returns the episode's versions, oldest first; those that led to a fork come before its own."""
        return self._episode.history()

    def fork(self, version: str | None = None, name: str | None = None) -> Episode:
        """Returns a new episode that begins at a version of this one (None: the head); see `AsyncEpisode.fork`."""
        return Episode(self._episode.fork(version, name), self._thread)

    def pause(self, key: str | None = None, *, reason: str = "") -> None:
        """Tells subscribers that the episode waits, e.g. for a tool; `key` says what for."""
        self._episode.pause(key, reason=reason)

    def resume_hint(self, key: str | None = None) -> None:
        """Tells subscribers, and the engine, that the episode goes on soon; see `AsyncEpisode.resume_hint`."""
        self._episode.resume_hint(key)

    def drop(self) -> None:
        """Forgets the episode and every version that no fork needs, and frees their KV; see `AsyncEpisode.drop`."""
        self._thread.call(self._episode.drop())


class AgentCache:
    """A model on an embedded vLLM whose episodes resume after their prompts were edited.

    ```python
    with AgentCache("smollm2", policy="edit_local") as cache:
        episode = cache.episode("thread-1")
        reply = episode.generate(messages, max_tokens=64)
        reply = episode.generate(edited_messages, max_tokens=64)
        print(reply.text, reply.recovery)
    ```

    The engine runs when the constructor returns, and ends with `close`, the `with` block, or the process. May be used from
    several threads.

    Args:
        model: A folder, a hub id, or the name of a built-in model.
        policy: Default recovery policy; `prefix_cache` is exact.
        **settings: Further fields of `CacheConfig`.

    Raises:
        ConfigError: A setting is unknown, out of range, or not accepted by vLLM.
        UnsupportedModelError: The model's KV cannot be recovered; lists why.
        EngineDeadError: The engine did not start.
    """

    def __init__(self, model: str | Path = "smollm2", *, policy: str = "prefix_cache", **settings: Any) -> None:
        self._cache = AsyncAgentCache(model, policy=policy, **settings)
        self._thread = _LoopThread()
        try:
            self._thread.call(self._cache.start())
        except BaseException:
            self._thread.stop()
            raise

    @property
    def config(self) -> CacheConfig:
        """The settings."""
        return self._cache.config

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self._cache.tokenizer

    @property
    def guard(self) -> QualityGuard:
        """The quality guard: what runs exactly because of it, and `reset`; may be used from any thread."""
        return self._cache.guard

    @property
    def pids(self) -> list[int]:
        """Ids of the engine's processes: EngineCore, then workers."""
        return self._cache.pids

    def episode(self, episode_id: str) -> Episode:
        """Returns the episode of this id; it begins with its first request."""
        return Episode(self._cache.episode(episode_id), self._thread)

    def reopen(self, episode_id: str) -> Episode:
        """Returns an episode of an earlier process, at its newest version in the store; see `AsyncAgentCache.reopen`."""
        return Episode(self._thread.call(self._cache.reopen(episode_id)), self._thread)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Returns whether all saves of replies that have ended are stored, in memory and in the store below it."""
        return self._thread.call(self._cache.flush(timeout_s))

    def generate(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Reply:
        """Returns the reply to a request that belongs to no episode: vLLM alone serves it."""
        return self._thread.call(self._cache.generate(messages, **options))

    def stream(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Generator[StreamChunk, None, None]:
        """Yields the reply of a request that belongs to no episode; closing the generator aborts it."""
        return self._thread.iterate(self._cache.stream(messages, **options))

    def render(self, messages: Messages, *, tools: Sequence[Tool] | None = None) -> Rendered:
        """Returns messages as token ids with the place of each message, as a request without an episode would send them."""
        return self._thread.call(self._cache.render(messages, tools=tools))

    def encode_chunk(self, text: str | Sequence[int], context: str | Sequence[int] | None = None) -> str:
        """Returns the id of a chunk: a memory unit or a document whose KV is kept, for `generate(..., sources=[id])`.

        See `AsyncAgentCache.encode_chunk`.
        """
        return self._thread.call(self._cache.encode_chunk(text, context))

    def drop_chunk(self, chunk: str) -> None:
        """Makes a chunk unfindable; see `AsyncAgentCache.drop_chunk`."""
        self._thread.call(self._cache.drop_chunk(chunk))

    def subscribe(self, subscriber: Subscriber, kinds: Iterable[EventKind] | None = None) -> Callable[[], None]:
        """Adds a function that gets each event, on the cache's thread or the caller's; returns the function that removes it."""
        return self._cache.subscribe(subscriber, kinds)

    def stats(self) -> dict[str, Any]:
        """Returns `engine` (what was learned of the model), `kv_tokens`, `episodes`, `chunks`, `guard` and each rank's counters."""
        return self._thread.call(self._cache.stats())

    def reset_prefix_cache(self, *, checkpoints: bool = False) -> bool:
        """Empties vLLM's own prefix cache, on request every checkpoint too; returns whether nothing was in use."""
        return self._thread.call(self._cache.reset_prefix_cache(checkpoints=checkpoints))

    def check_recovery(
        self, old_ids: Sequence[int], new_ids: Sequence[int], prefix: int, suffix: int
    ) -> dict[str, float]:
        """Returns a recovery's relative errors against a full prefill (`engine.selfcheck`); the engine must be idle."""
        return self._thread.call(self._cache.check_recovery(old_ids, new_ids, prefix, suffix))

    def profile_pair(self, old_ids: Sequence[int], new_ids: Sequence[int], **wanted: Any) -> dict[str, Any]:
        """Returns what two revisions of a prompt show on an idle engine; see `AsyncAgentCache.profile_pair`."""
        return self._thread.call(self._cache.profile_pair(old_ids, new_ids, **wanted))

    def probe(self, name: Literal["drift", "shift"], *args: Any) -> dict[str, Any]:
        """Returns what a probe measures on an idle engine; see `AsyncAgentCache.probe`."""
        return self._thread.call(self._cache.probe(name, *args))

    def restart(self) -> Self:
        """Returns self with a new engine. Episodes keep their history; their KV is gone, so each next request is exact."""
        self._thread.call(self._cache.restart())
        return self

    def close(self) -> None:
        """Ends the engine and its processes, after open saves are stored. Idempotent; open requests fail with EngineDeadError."""
        if self._thread.alive:
            self._thread.call(self._cache.close())
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
