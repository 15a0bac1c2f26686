"""Chunks: a memory unit or a document, encoded once and reused wherever its text stands in a prompt. No torch, no vLLM.

A chunk is a version like any other, in an eviction group of its own and outside of every episode. Its id is made of what it
holds, so whoever encodes the same text again, also in another process on the same store, finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from agentcache.engine.upkeep import free_versions
from agentcache.engine.wire import ResumeParams
from agentcache.episodes import Rendered
from agentcache.episodes.diff import as_ids
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.reply import RecoveryReport, Reply
from agentcache.request import RequestOptions

if TYPE_CHECKING:
    from agentcache.engine.session import Session

__all__ = ["Chunk", "Chunks", "chunk_id"]

_PREFIX = "chunk-"
_MOST_IDS = 1 << 31  # vLLM knows the vocabulary and refuses what is beyond it


class Chunk(NamedTuple):
    """What is known of a chunk.

    Attributes:
        tokens: Of its text.
        context_tokens: What it was encoded behind.
    """

    tokens: int
    context_tokens: int


def chunk_id(namespace: str, context: Sequence[int], text: Sequence[int]) -> str:
    """Returns the id of a chunk: equal for equal token ids in one namespace, whatever the model."""
    digest = hashlib.blake2b(digest_size=16, person=b"agentcache.chunk")
    for part in (namespace.encode(), np.asarray(context, "<i4").tobytes(), np.asarray(text, "<i4").tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return _PREFIX + digest.hexdigest()


class Chunks:
    """The chunks that a cache has encoded, as far as it knows them to be there.

    Args:
        session: The cache's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str, Chunk] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def listed(self) -> dict[str, Chunk]:
        """Returns the known chunks by id."""
        return dict(self._known)

    def forget(self, ids: Iterable[str] | None = None) -> None:
        """Forgets chunks that are no longer there; None: all."""
        for name in [*self._known] if ids is None else ids:
            self._known.pop(name, None)

    async def encode(self, text: str | Sequence[int], context: str | Sequence[int] | None) -> str:
        """Returns the id of a chunk once its KV is kept; at once when it is known to be.

        Raises:
            ConfigError: The text is empty or longer than the model takes.
            AgentCacheError: Its KV could not be kept.
        """
        session = self._session
        most = int(session.running().llm.model_config.max_model_len)
        before = self._ids("" if context is None else context, begins=True)
        ids = self._ids(text, begins=False)
        if not ids:
            raise ConfigError(f"a chunk needs text, got {text!r}: there is no token to encode")
        if len(before) + len(ids) >= most:
            raise ConfigError(
                f"the chunk has {len(ids)} tokens behind {len(before)} of its context; the model takes fewer than {most} "
                f"together (max_model_len). Cut it into several chunks"
            )
        name = chunk_id(session.config.namespace, before, ids)
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:  # the same text at the same time is encoded once
            if name not in self._known:
                if not await self._is_below(name, ids[0]):
                    await self._save(name, [*before, *ids])
                self._known[name] = Chunk(len(ids), len(before))
        return name

    async def drop(self, chunk: str) -> None:
        """Makes a chunk unfindable in memory and in the store below it; versions that share its rows keep them.

        Raises:
            ConfigError: This is no chunk's id.
            StoreError: The store below cannot be changed.
        """
        if not chunk.startswith(_PREFIX):
            raise ConfigError(
                f"{chunk!r} is no chunk; its id begins with {_PREFIX!r}. Episodes are dropped by Episode.drop()"
            )
        self.forget([chunk])
        await free_versions(self._session, [chunk])

    def _ids(self, text: str | Sequence[int], *, begins: bool) -> list[int]:
        """Returns text as token ids; at the beginning of a prompt with what the tokenizer puts there."""
        if isinstance(text, str):
            return list(map(int, self._session.tokenizer.encode(text, add_special_tokens=begins)))
        ids = as_ids(text)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < _MOST_IDS:
            raise ConfigError(f"token ids lie from 0 to the vocabulary's end, got {int(ids.min())} to {int(ids.max())}")
        return [int(token) for token in ids]

    async def _is_below(self, name: str, token: int) -> bool:
        """Whether an earlier process has left the chunk in the store below, and this engine can use it."""
        session = self._session
        if session.store is None or not await asyncio.to_thread(session.store.has, session.config.namespace, name):
            return False
        return await self._is_there(name, token)

    async def _is_there(self, name: str, token: int) -> bool:
        """Whether the engine finds the chunk: a request of one token that names it is told."""
        asked = await self._ask([token], ResumeParams(version=f"{name}?{token_hex(8)}", sources=[name], save=False))
        return name not in asked.lost_sources

    async def _save(self, name: str, ids: list[int]) -> None:
        report = await self._ask(ids, ResumeParams(version=name))
        # Another handle of this engine's, or an earlier life of this one, may have encoded it.
        if report.saved != "pending" and not await self._is_there(name, ids[0]):
            raise AgentCacheError(f"the KV of a chunk of {len(ids)} tokens could not be kept: {report.reason}")

    async def _ask(self, ids: list[int], resume: ResumeParams) -> RecoveryReport:
        """Runs a request for one token in the cache's namespace; returns its report."""
        session = self._session
        prompt = Rendered(np.array(ids, dtype=np.int32), (), (), "")
        resume = resume.model_copy(update={"namespace": session.config.namespace})
        one = RequestOptions(max_tokens=1)
        reply: Reply | None = None
        run = session.run(prompt, one, started=time.perf_counter(), resume=resume, every_token=False)
        async with contextlib.aclosing(run) as pieces:
            async for piece in pieces:
                reply = piece.reply
        assert reply is not None and reply.recovery is not None
        return reply.recovery
