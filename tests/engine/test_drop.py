"""Dropping an episode, on a stand-in for the engine; `embedded/test_episodes.py` does it on a real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentcache.config import CacheConfig
from agentcache.engine.episode import AsyncEpisode
from agentcache.engine.session import Session
from agentcache.errors import StoreError
from agentcache.store.tiers import Refused


class StubSession(Session):
    """A session whose engine and store note what they are told."""

    def __init__(self, listed: Any) -> None:
        super().__init__(CacheConfig.build())
        self.dropped: list[str] = []
        self.deleted: list[str] = []
        self.engine = SimpleNamespace(dead=False, call=self.call)  # type: ignore[assignment]
        self.store = SimpleNamespace(versions=lambda _: listed, delete=lambda _, v: self.deleted.append(v) or True)  # type: ignore[assignment]

    def running(self) -> Any:
        return self.engine

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        if method == "agentcache_drop":
            self.dropped += arguments[1]
        return []

    async def run(self, *_: Any, **__: Any) -> Any:
        yield None


async def test_an_episodes_versions_are_freed_in_memory_and_below_also_those_of_an_earlier_process() -> None:
    listed = [SimpleNamespace(version=v, group=g) for v, g in (("old", "e"), ("other", "f"))]
    session = StubSession(listed)
    made = session.tracker.record("e", [1, 2, 3]).version
    await AsyncEpisode(session, "e").drop()
    assert session.dropped == session.deleted == [made, "old"]


async def test_a_store_that_cannot_be_listed_keeps_no_version_in_memory() -> None:
    session = StubSession(Refused("the disk is gone", "unavailable"))
    made = session.tracker.record("e", [1, 2, 3]).version
    with pytest.raises(StoreError, match="cannot be listed: the disk is gone"):
        await AsyncEpisode(session, "e").drop()
    assert session.dropped == session.deleted == [made] and session.tracker.episodes() == ()
