"""Dropping an episode, on a stand-in for the engine; test_embedded does it on a real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentcache.engine.episode import AsyncEpisode
from agentcache.episodes import EpisodeTracker
from agentcache.errors import StoreError
from agentcache.store.tiers import Refused


class Session:
    """What a drop needs of a cache's session; the engine and the store note what they are told."""

    def __init__(self, listed: Any) -> None:
        self.dropped: list[str] = []
        self.deleted: list[str] = []
        self.tracker = EpisodeTracker()
        self.reports: dict[str, Any] = {}
        self.without_kv: set[str] = set()
        self.guard = SimpleNamespace(forget=lambda _: None)
        self.config = SimpleNamespace(namespace="n")
        self.engine = SimpleNamespace(dead=False, call=self.call)
        self.store = SimpleNamespace(versions=lambda _: listed, delete=lambda _, v: self.deleted.append(v) or True)

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
    session = Session(listed)
    made = session.tracker.record("e", [1, 2, 3]).version
    await AsyncEpisode(session, "e").drop()  # type: ignore[arg-type]
    assert session.dropped == session.deleted == [made, "old"]


async def test_a_store_that_cannot_be_listed_keeps_no_version_in_memory() -> None:
    session = Session(Refused("the disk is gone", "unavailable"))
    made = session.tracker.record("e", [1, 2, 3]).version
    with pytest.raises(StoreError, match="cannot be listed: the disk is gone"):
        await AsyncEpisode(session, "e").drop()  # type: ignore[arg-type]
    assert session.dropped == session.deleted == [made] and session.tracker.episodes() == ()
