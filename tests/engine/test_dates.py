"""The date that an episode's prompts print: its start, whatever day it is now. Real sessions and stores, no engine."""

from __future__ import annotations

import asyncio
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from agentcache import AsyncAgentCache, RenderError
from agentcache.episodes import EpisodeTracker
from agentcache.store.tiers import Manifest
from agentcache.store.tiers.memory import MemoryStore

START = datetime(2026, 7, 1, 23, 59)


class Dates:
    """Stands in for the renderer: notes the date that a prompt may print, and refuses it."""

    def __init__(self) -> None:
        self.seen: list[datetime | None] = []

    def render(self, *_: Any, now: datetime | None = None, **__: Any) -> Any:
        self.seen.append(now)
        raise RenderError("noted")


@pytest.fixture
async def cache() -> AsyncAgentCache:
    cache = AsyncAgentCache()
    session = cache._session
    session.engine, session.loop = SimpleNamespace(dead=False), asyncio.get_running_loop()  # type: ignore[assignment]
    session._renderer = Dates()  # type: ignore[assignment]
    session.tracker = EpisodeTracker(session.bus, clock=START.timestamp)
    return cache


async def date(cache: AsyncAgentCache, episode: str) -> datetime:
    """The date that the next prompt of an episode may print."""
    with pytest.raises(RenderError, match="noted"):
        await cache.episode(episode).generate([{"role": "user", "content": "Which day is it?"}])
    seen: Any = cache._session._renderer
    found = seen.seen[-1]
    assert isinstance(found, datetime)
    return found


def saved(store: MemoryStore, version: str, created: float) -> None:
    draft = Manifest.draft(
        fingerprint={}, namespace="default", version=version, group="e", token_ids=[1], extents=(), objects=()
    )
    ticket = store.prepare(draft.model_copy(update={"created": created}), 0)
    assert isinstance(ticket, str) and isinstance(store.complete(ticket), Manifest)


async def test_an_episodes_prompts_print_the_date_of_its_start(cache: AsyncAgentCache) -> None:
    before = datetime.now()
    assert before <= await date(cache, "e") <= datetime.now()  # it begins
    cache._session.tracker.record("e", [1, 2])
    assert await date(cache, "e") == START
    cache._session.tracker._clock = datetime(2026, 7, 2).timestamp
    cache._session.tracker.record("e", [1, 2, 3])
    cache._session.tracker.record("other", [1])
    cache.episode("e").fork(name="fork")
    assert await date(cache, "e") == await date(cache, "fork") == START
    assert await date(cache, "other") == datetime(2026, 7, 2)
    cache._session.forget("e")  # it begins anew
    assert before <= await date(cache, "e") <= datetime.now()


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_reopened_episode_prints_the_date_of_its_oldest_version(cache: AsyncAgentCache, deleted: bool) -> None:
    began, later = datetime(2026, 6, 1, 12), datetime(2026, 6, 2, 12)
    with MemoryStore(1 << 20) as store:
        cache._session.store = store
        for version, created in (("v1", began), ("v2", later), ("v3", later)):
            saved(store, version, created.timestamp())
        if deleted:
            store.delete("default", "v1")
        episode = await cache.reopen("e")
        assert episode.head == "v3" and await date(cache, "e") == (later if deleted else began)
        episode.fork(name="fork")
        assert await date(cache, "fork") == await date(cache, "e")


async def test_a_checkpoint_without_a_date_is_of_the_day_on_which_it_is_reopened(cache: AsyncAgentCache) -> None:
    with MemoryStore(1 << 20) as store:
        cache._session.store = store
        saved(store, "v1", 0.0)
        await cache.reopen("e")
        assert await date(cache, "e") == START
