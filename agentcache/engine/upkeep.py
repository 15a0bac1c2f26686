"""Waits for saves, and frees the KV of versions that nobody will resume. No torch, no vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agentcache.episodes import Rendered
from agentcache.errors import AgentCacheError, StoreError
from agentcache.request import RequestOptions
from agentcache.store.tiers import Refused

if TYPE_CHECKING:
    from agentcache.engine.session import Session

__all__ = ["FLUSH_S", "flush", "free_late", "free_versions", "stored_versions"]

logger = logging.getLogger(__name__)

FLUSH_S: Final = 30.0
"""How long saves are waited for unless the caller says otherwise."""


async def flush(session: Session, timeout_s: float = FLUSH_S) -> bool:
    """Returns whether all saves of replies that have ended are stored, in memory and in the store below it.

    Args:
        session: A cache's.
        timeout_s: How long to wait for that.
    """
    engine = session.running()
    deadline = time.monotonic() + timeout_s
    await _step(session)  # the workers hear in the next step what ended
    while any(_open_saves(rank) for rank in await engine.call("agentcache_stats")):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def free_versions(session: Session, versions: Collection[str]) -> None:
    """Makes versions unfindable in memory and in the store below it, and frees the rows that no other version shares.

    One whose save is open is not kept either. An engine that is gone has nothing in memory.

    Args:
        session: A cache's.
        versions: Ids, also such that are no longer, or not yet, stored.

    Raises:
        StoreError: The store below cannot be changed, or saves into it have not ended after `FLUSH_S`.
    """
    if not versions:
        return
    if session.engine is not None and not session.engine.dead:
        await session.running().call("agentcache_drop", session.config.namespace, list(versions))
        await _step(session)  # the workers' reports are taken in with a step
        if session.store is not None and not await flush(session):
            raise StoreError(
                f"{len(versions)} versions are gone from memory; saves into the store are still open after {FLUSH_S:.0f} s, "
                "so that some may arrive there yet: drop them again"
            )
    if session.store is not None:
        for version in versions:
            gone = await asyncio.to_thread(session.store.delete, session.config.namespace, version)
            if isinstance(gone, Refused):
                raise StoreError(f"version {version!r} is gone from memory, and is still in the store: {gone.reason}")


async def free_late(session: Session, version: str) -> None:
    """Frees a version whose episode was dropped while it was being generated; a failure is logged."""
    try:
        await free_versions(session, [version])
    except AgentCacheError as error:
        logger.warning("version %s of a dropped episode is still stored: %s", version, error)


async def stored_versions(session: Session, episode: str) -> Sequence[str]:
    """Returns the ids of an episode's versions in the store below memory, also of earlier processes.

    Raises:
        StoreError: It cannot be read.
    """
    if session.store is None:
        return ()
    listed = await asyncio.to_thread(session.store.versions, session.config.namespace)
    if isinstance(listed, Refused):
        raise StoreError(f"the store cannot be listed: {listed.reason}")
    return [info.version for info in listed if info.group == episode]


async def _step(session: Session) -> None:
    """Runs a request of one token, so that the engine makes a step."""
    prompt = Rendered(np.zeros(1, dtype=np.int32), (), (), "")
    run = session.run(prompt, RequestOptions(max_tokens=1), started=time.perf_counter(), every_token=False)
    async with contextlib.aclosing(run) as chunks:
        async for _ in chunks:
            pass


def _open_saves(rank: dict[str, Any]) -> bool:
    """Whether a worker, or the scheduler half as far as it has told, has a save that is not stored yet."""
    tier = rank["tier"] or {"worker": {"pending": 0}, "scheduler": {}}
    known = (rank["pending_saves"], rank["index"].get("open_saves"), tier["worker"]["pending"])
    return any(known) or bool(tier["scheduler"].get("open_saves"))
