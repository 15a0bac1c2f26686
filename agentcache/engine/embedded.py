"""`AsyncAgentCache`: a model on a vLLM engine that is embedded in this process's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Self, Unpack

from rich.console import Console

from agentcache.config import CacheConfig
from agentcache.engine.episode import BEGAN, AsyncEpisode, last_reply
from agentcache.engine.launch import Engine, EngineStart
from agentcache.engine.session import Session
from agentcache.engine.upkeep import FLUSH_S, flush
from agentcache.episodes import Rendered
from agentcache.episodes.messages import Tool
from agentcache.errors import AgentCacheError, UnknownVersionError, UnsupportedModelError
from agentcache.event_log import JsonlEventLog
from agentcache.events import EventKind, Subscriber
from agentcache.guard import QualityGuard
from agentcache.recovery import get_policy
from agentcache.reply import Reply, StreamChunk
from agentcache.request import GenerateOptions, Messages, RequestOptions
from agentcache.store.tiers import open_store
from agentcache.weights import resolve_model

__all__ = ["AsyncAgentCache"]

logger = logging.getLogger(__name__)

_IDLE_S = 30.0


class AsyncAgentCache:
    """A model on an embedded vLLM whose episodes resume after their prompts were edited.

    Use it on one event loop: `async with AsyncAgentCache("smollm2", policy="edit_local") as cache:`.

    Args:
        model: A folder, a hub id, or the name of a built-in model.
        policy: Default recovery policy.
        **settings: Further fields of `CacheConfig`.

    Raises:
        ConfigError: A setting is unknown or out of range.
    """

    def __init__(self, model: str | Path = "smollm2", *, policy: str = "prefix_cache", **settings: Any) -> None:
        self.config = CacheConfig.build(model=str(model), policy=policy, **settings)
        # An unknown one is known before the engine starts.
        get_policy(self.config.policy, self.config.options_for(self.config.policy, self.config.policy_options))
        self._session = Session(self.config)
        self._lifecycle = asyncio.Lock()
        self._description: dict[str, Any] = {}
        self._model: str | None = None
        self._until_close = contextlib.ExitStack()
        self._finalizer: Callable[[], object] | None = None

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Returns self once the engine runs. Idempotent.

        Raises:
            ConfigError: vLLM does not accept the settings.
            UnsupportedModelError: The model's KV cannot be recovered; lists why.
            EngineDeadError: The engine did not start.
        """
        async with self._lifecycle:
            if self._session.engine is None:
                with contextlib.ExitStack() as stack:
                    if self.config.events is not None:
                        log = stack.enter_context(JsonlEventLog(self.config.events))
                        stack.callback(self._session.bus.subscribe(log))
                    url = self.config.to_connector().durable_url
                    if url is not None:
                        # Also so that a store that cannot be opened is known before the engine starts.
                        self._session.store = stack.enter_context(await asyncio.to_thread(open_store, url))
                        stack.callback(self._forget_store)
                    self._model = str(await asyncio.to_thread(resolve_model, self.config.model))
                    await self._launch()
                    self._until_close = stack.pop_all()
        return self

    async def restart(self) -> Self:
        """Returns self with a new engine. Episodes keep their history; their KV is gone, so each next request is exact."""
        async with self._lifecycle:
            if self._model is None:
                raise AgentCacheError("this cache is not open; call start()")
            await self._stop()
            await self._launch()
        return self

    async def close(self) -> None:
        """Ends the engine and its processes, after open saves are in the store below memory. Idempotent.

        Open requests fail with EngineDeadError.
        """
        async with self._lifecycle:
            self._model = None
            if self._session.store is not None and self._session.engine is not None and not self._session.engine.dead:
                await self._flush_before_close()
            await self._stop()
            self._until_close.close()

    def _forget_store(self) -> None:
        self._session.store = None

    async def _flush_before_close(self) -> None:
        try:
            if not await self.flush():
                logger.warning("saves were still open after %.0f s; what is not stored is lost", FLUSH_S)
        except AgentCacheError as error:
            logger.warning("open saves are lost: %s", error)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _launch(self) -> None:
        assert self._model is not None
        start = EngineStart(self.config, self._model)
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "agentcache-start") as thread, _status(f"Starting vLLM with {self.config.model}"):
            run = loop.run_in_executor(thread, start.run)
            try:
                engine = await asyncio.shield(run)
            except asyncio.CancelledError:
                start.give_up()
                (late,) = await asyncio.gather(run, return_exceptions=True)
                if isinstance(late, Engine):
                    await asyncio.to_thread(late.stop)
                raise
            try:
                ranks = await engine.call("agentcache_attach")
                reasons = [reason for rank in ranks for reason in rank["reasons"]]
                if not all(rank["ok"] for rank in ranks):
                    raise UnsupportedModelError(self.config.model, dict.fromkeys(reasons))
                # vLLM asks once, before the first request; on an engine that has died meanwhile it would wait for ever.
                await engine.llm.get_supported_tasks()
            except BaseException:
                await asyncio.to_thread(engine.stop)
                raise
        self._description = {k: v for k, v in ranks[0].items() if k not in ("ok", "reasons")}
        self._session.begin(engine)
        self._finalizer = weakref.finalize(self, engine.stop).detach

    async def _stop(self) -> None:
        engine, self._session.engine = self._session.engine, None
        await self._session.shadows.stop()
        if engine is not None:
            await asyncio.to_thread(engine.stop)
        if self._finalizer is not None:
            self._finalizer()

    # -- requests ------------------------------------------------------------------------------------------------------

    def episode(self, episode_id: str) -> AsyncEpisode:
        """Returns the episode of this id; it begins with its first request."""
        return AsyncEpisode(self._session, episode_id)

    async def generate(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Reply:
        """Returns the reply to a request that belongs to no episode: vLLM alone serves it."""
        return await last_reply(self._run(messages, options, every_token=False))

    async def stream(self, messages: Messages, **options: Unpack[GenerateOptions]) -> AsyncGenerator[StreamChunk, None]:
        """Yields the reply of a request that belongs to no episode, token by token; closing the generator aborts it."""
        async with contextlib.aclosing(self._run(messages, options, every_token=True)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _run(
        self, messages: Messages, options: GenerateOptions, *, every_token: bool
    ) -> AsyncGenerator[StreamChunk, None]:
        request = RequestOptions.build(options)
        request.refuse_recovery()
        self._session.running()
        prompt = await self._session.render(messages, request.tools)
        chunks = self._session.run(prompt, request, started=time.perf_counter(), every_token=every_token)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def render(self, messages: Messages, *, tools: Sequence[Tool] | None = None) -> Rendered:
        """Returns messages as token ids with the place of each message, as a request without an episode would send them."""
        return await self._session.render(messages, tools)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    async def encode_chunk(self, text: str | Sequence[int], context: str | Sequence[int] | None = None) -> str:
        """Returns the id of a chunk: a memory unit or a document whose KV is kept, for `generate(..., sources=[id])`.

        A lossy policy takes its rows wherever its text stands in a prompt, in any order and behind any other text. The id is
        made of the namespace and the tokens; a chunk that is there is not encoded again. It is evicted like an episode, and a
        request says when it is gone (`recovery.lost_sources`): encode it again then.

        Args:
            text: The text, as the prompts will have it, or its token ids.
            context: What it is encoded behind, e.g. the system prompt, or its token ids; None: what the tokenizer begins a text with.

        Raises:
            ConfigError: The text is empty, or longer than the model takes.
            AgentCacheError: Its KV could not be kept; says why.
        """
        return await self._session.chunks.encode(text, context)

    async def drop_chunk(self, chunk: str) -> None:
        """Makes a chunk unfindable, in memory and in the store below it; versions that share its rows keep them.

        Raises:
            ConfigError: This is no chunk's id.
            StoreError: The store below cannot be changed.
        """
        await self._session.chunks.drop(chunk)

    async def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Returns whether all saves of replies that have ended are stored, in memory and in the store below it.

        Args:
            timeout_s: How long to wait for that.
        """
        return await flush(self._session, timeout_s)

    async def reopen(self, episode_id: str) -> AsyncEpisode:
        """Returns an episode of an earlier process, which goes on at its newest version in the store below memory.

        A date that its prompts print stays that of its oldest version there.

        Raises:
            AgentCacheError: The cache has no such store, or the episode is open already.
            UnknownVersionError: The store has no version of it.
            StoreError: The store cannot be read.
        """
        tracker = self._session.tracker
        if episode_id in tracker.episodes():
            raise AgentCacheError(f"episode {episode_id!r} is open in this process already; use episode()")
        found = await asyncio.to_thread(self._session.stored, episode_id)
        if episode_id not in tracker.episodes():  # another call may have opened it meanwhile
            # What is known is kept for a fork of it; it was dropped.
            if found is None or tracker.knows(found.newest.version):
                raise UnknownVersionError(
                    f"the store has no version of episode {episode_id!r} in namespace {self.config.namespace!r}; begin it anew "
                    "with episode()"
                )
            newest = found.newest
            began = {BEGAN: found.began_s} if found.began_s else {}
            tracker.record(episode_id, newest.token_ids, version=newest.version, attributes=began)
            tracker.finish(newest.version, [], computed=newest.tokens.length)
        return AsyncEpisode(self._session, episode_id)

    # -- the rest ------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self._session.tokenizer

    @property
    def guard(self) -> QualityGuard:
        """The quality guard: what runs exactly because of it, and `reset`. A restart of the engine keeps what it knows."""
        return self._session.guard

    def subscribe(self, subscriber: Subscriber, kinds: Iterable[EventKind] | None = None) -> Callable[[], None]:
        """Adds a function or coroutine function that gets each event; returns the function that removes it."""
        return self._session.bus.subscribe(subscriber, kinds)

    async def stats(self) -> dict[str, Any]:
        """Returns `engine` (what was learned of the model), `kv_tokens`, `episodes`, `chunks`, `guard` and each rank's counters.

        `chunks` are those that this cache has encoded and that, as far as it knows, are there.
        """
        engine = self._session.running()
        return {
            "engine": dict(self._description),
            "kv_tokens": engine.kv_tokens,
            "episodes": len(self._session.tracker.episodes()),
            "chunks": {name: chunk._asdict() for name, chunk in self._session.chunks.listed().items()},
            "guard": self._session.guard.stats() | {"waiting": self._session.shadows.waiting},
            "ranks": await engine.call("agentcache_stats"),
        }

    async def reset_prefix_cache(self, *, checkpoints: bool = False) -> bool:
        """Empties vLLM's own prefix cache, on request every checkpoint too; returns whether nothing was in use."""
        if checkpoints:
            self._session.chunks.forget()
        return bool(await self._session.running().llm.reset_prefix_cache(reset_connector=checkpoints))

    async def check_recovery(
        self, old_ids: Sequence[int], new_ids: Sequence[int], prefix: int, suffix: int
    ) -> dict[str, float]:
        """Returns a recovery's relative errors against a full prefill (`engine.selfcheck`); the engine must be idle."""
        await self._empty()
        ranks = await self._session.running().call("agentcache_check", list(old_ids), list(new_ids), prefix, suffix)
        await self._empty()
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    async def profile_pair(self, old_ids: Sequence[int], new_ids: Sequence[int], **wanted: Any) -> dict[str, Any]:
        """Returns what two revisions of a prompt show on an idle engine; see `engine.profile_rpc.measure_pair`, and its options.

        Raises:
            AgentCacheError: The engine is not idle.
            RequestError: Nothing is aligned behind the edit, or the KV cache is too small.
        """
        await self._empty()
        ranks = await self._session.running().call("agentcache_profile", list(old_ids), list(new_ids), wanted)
        await self._empty()
        measured: dict[str, Any] = ranks[0]  # they have agreed on all that they measured
        return measured

    async def probe(self, name: Literal["drift", "shift"], *args: Any) -> dict[str, Any]:
        """Returns what a probe of `engine.drift_probe` or `engine.shift_probe` measures on an idle engine.

        Raises:
            AgentCacheError: The engine is not idle.
            RequestError: There is nothing to measure, or the KV cache is too small.
        """
        await self._empty()
        ranks = await self._session.running().call(f"agentcache_{name}", *args)
        await self._empty()
        measured: dict[str, Any] = ranks[0]  # they have agreed on all that they measured
        return measured

    async def _empty(self) -> None:
        """Empties the prefix cache of an engine without open requests or saves."""
        deadline = time.monotonic() + _IDLE_S
        while not await self.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise AgentCacheError(
                    f"the engine is not idle: requests or saves were open for {_IDLE_S:.0f} s; end them first"
                )
            await asyncio.sleep(0.05)

    @property
    def pids(self) -> list[int]:
        """Ids of the engine's processes: EngineCore, then workers."""
        return [] if self._session.engine is None else self._session.engine.pids


@contextlib.contextmanager
def _status(text: str) -> Iterator[None]:
    """Shows a line with a spinner on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield
