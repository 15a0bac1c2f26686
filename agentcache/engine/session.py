"""What the episodes of one cache share: its engine, tracker, events, renderer and reports. Outlives a restart of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, cast

import numpy as np

from agentcache.config import CacheConfig
from agentcache.engine.chunks import Chunks
from agentcache.engine.launch import Engine
from agentcache.engine.shadow import Shadows
from agentcache.episodes import EpisodeTracker, Rendered, Renderer
from agentcache.episodes.diff import TokenIds, as_ids
from agentcache.episodes.messages import Tool
from agentcache.episodes.pieces import TokenArray
from agentcache.errors import AgentCacheError, StoreError
from agentcache.events import EventBus
from agentcache.guard import QualityGuard
from agentcache.reply import RecoveryReport, StreamChunk
from agentcache.request import Messages, RequestOptions
from agentcache.store.tiers import KVStore, Manifest, Refused, VersionInfo

__all__ = ["Session", "StoredEpisode", "Underway"]

logger = logging.getLogger(__name__)


class StoredEpisode(NamedTuple):
    """An episode in the store below memory.

    Attributes:
        newest: Its newest version.
        began_s: When the oldest version that is left was saved, in seconds since the epoch; 0 when that is unknown.
    """

    newest: Manifest
    began_s: float


@dataclass(eq=False, slots=True)
class Underway:
    """A request whose prompt is no version yet.

    Attributes:
        dropped: Whether its episode was dropped meanwhile.
    """

    dropped: bool = False


class Session:
    """What the episodes of one cache share.

    Attributes:
        config: The cache's settings.
        bus: Delivers events.
        tracker: Keeps episodes and versions.
        reports: Recovery reports by version.
        without_kv: Versions that no child can be recovered from: still generating, aborted, or not saved.
        engine: The running engine, or None.
        loop: The event loop that the engine belongs to.
        store: The caller's handle of the store below memory, or None.
        guard: Judges approximate resumes.
        shadows: Runs the exact twins that it judges them by.
        chunks: Encodes chunks and knows those that are there.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.bus = EventBus()
        self.tracker = EpisodeTracker(self.bus)
        self.reports: dict[str, RecoveryReport] = {}
        self.without_kv: set[str] = set()
        self.engine: Engine | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.store: KVStore | None = None
        self.guard = QualityGuard(config.guard)
        self.shadows = Shadows(self)
        self.chunks = Chunks(self)
        self._underway: dict[str, list[Underway]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokenizer: Any = None
        self._renderer: Renderer | None = None

    def running(self) -> Engine:
        """Returns the engine.

        Raises:
            AgentCacheError: There is none, or it belongs to another event loop.
            EngineDeadError: It has died.
        """
        if self.engine is None:
            raise AgentCacheError("this cache has no engine: it was not started or is closed; call start()")
        if self.engine.dead:
            raise self.engine.death()
        if asyncio.get_running_loop() is not self.loop:
            raise AgentCacheError("this cache was started on another event loop; use it there, or use AgentCache")
        return self.engine

    def begin(self, engine: Engine) -> None:
        """Makes an engine the running one."""
        self.engine, self.loop = engine, asyncio.get_running_loop()
        self.chunks.forget()
        self._tokenizer = engine.llm.get_tokenizer()

    def stored(self, episode: str) -> StoredEpisode | None:
        """Returns what the store below memory can still give of an episode, or None. Blocks.

        Raises:
            AgentCacheError: The cache has no such store.
            StoreError: It cannot be read.
        """
        if self.store is None:
            raise AgentCacheError(
                "this cache has no durable store; give it one, e.g. store='disk:///var/lib/agentcache'"
            )
        listed = self.store.versions(self.config.namespace)
        if isinstance(listed, Refused):
            raise StoreError(f"the store cannot be listed: {listed.reason}")
        own = sorted((info for info in listed if info.group == episode), key=lambda info: info.sequence)
        newest = self._first_found(reversed(own))
        if newest is None:
            return None
        oldest = self._first_found(own) if len(own) > 1 else newest
        return StoredEpisode(newest, (oldest or newest).created)

    def _first_found(self, infos: Iterable[VersionInfo]) -> Manifest | None:
        assert self.store is not None
        for info in infos:
            found = self.store.find(info.namespace, info.version)
            if isinstance(found, Manifest):
                return found
        return None

    def hint(self, version: str) -> None:
        """Tells the engine that a version will be resumed soon; from any thread, and waits for nothing."""
        engine, loop = self.engine, self.loop
        if engine is None or loop is None or engine.dead:
            return

        async def call() -> None:
            try:
                await engine.call("agentcache_hint", self.config.namespace, version)
            except AgentCacheError as error:  # a hint is only a hint
                logger.warning("the hint for version %s did not reach the engine: %s", version, error)

        asyncio.run_coroutine_threadsafe(call(), loop)

    @contextlib.contextmanager
    def underway(self, episode: str) -> Iterator[Underway]:
        """Yields what hears of a drop of the episode until the block ends, by `forget`."""
        request = Underway()
        requests = self._underway.setdefault(episode, [])
        requests.append(request)
        try:
            yield request
        finally:
            requests.remove(request)
            if not requests:
                del self._underway[episode]

    def forget(self, episode: str) -> tuple[str, ...]:
        """Removes an episode, unless in the engine and the store; returns its versions that no fork needs."""
        for request in self._underway.get(episode, ()):
            request.dropped = True
        self.guard.forget(episode)
        gone = self.tracker.drop(episode)
        for version in gone:
            self.reports.pop(version, None)
            self.without_kv.discard(version)
        return gone

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work on the running event loop that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        if self._tokenizer is None:
            raise AgentCacheError("this cache has no tokenizer yet; call start()")
        return self._tokenizer

    async def render(
        self,
        messages: Messages,
        tools: Sequence[Tool] | None = None,
        *,
        replies: Sequence[TokenArray] = (),
        began: datetime | None = None,
    ) -> Rendered:
        """Returns messages as a prompt; token ids pass through.

        Args:
            messages: Chat messages, one user message, or token ids.
            tools: Schemas for the chat template.
            replies: Ids of earlier replies, to be spliced in where the text agrees.
            began: The date that the template may print.

        Raises:
            RenderError: The chat template refuses the messages.
            ConfigError: Neither messages nor token ids.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        elif len(messages) and not isinstance(messages[0], Mapping):
            ids = as_ids(cast("TokenIds", messages)).astype(np.int32)
            ids.flags.writeable = False
            return Rendered(ids, (), (), "")
        if self._renderer is None:
            self._renderer = await asyncio.to_thread(Renderer, self.tokenizer)
        chat = cast("Sequence[Mapping[str, Any]]", messages)
        return await asyncio.to_thread(self._renderer.render, chat, tools=tools, generated=replies, now=began)

    async def run(self, prompt: Rendered, options: RequestOptions, **details: Any) -> AsyncGenerator[StreamChunk, None]:
        """Yields the chunks of one request on the running engine; see `requests.run_request`."""
        from agentcache.engine.requests import run_request  # it imports vLLM, which `launch` does quietly

        chunks = run_request(self.running(), prompt.token_ids.tolist(), options, **details)
        with self.shadows.giving_way():
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
