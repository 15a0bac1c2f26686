"""Which episodes a chat model looks for in the store below memory, and what a store that fails does to calls. No engine."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from agentcache import AsyncAgentCache
from agentcache.integrations.langchain.calls import Call, Caller
from agentcache.integrations.langchain.engine import EngineHandle
from agentcache.integrations.langchain.runs import Run
from agentcache.integrations.routing import Router
from agentcache.store.tiers import Manifest, Refused
from agentcache.store.tiers.memory import MemoryStore


class Store(MemoryStore):
    """Counts how often it is listed, and refuses that while `fault` says so."""

    fault: str | None = None
    listed = 0

    def versions(self, namespace: str | None = None) -> Any:
        self.listed += 1
        return super().versions(namespace) if self.fault is None else Refused(self.fault, "unavailable")

    def save(self, episode: str, version: str, token_ids: list[int]) -> None:
        """Saves a version without rows."""
        draft = Manifest.draft(
            fingerprint={},
            namespace="default",
            version=version,
            group=episode,
            token_ids=token_ids,
            extents=(),
            objects=(),
        )
        ticket = self.prepare(draft, 0)
        assert isinstance(ticket, str) and isinstance(self.complete(ticket), Manifest)


@pytest.fixture
def store() -> Store:
    return Store(1 << 20)


@pytest.fixture
def handle(store: Store) -> EngineHandle:
    cache = AsyncAgentCache()
    cache._session.engine, cache._session.store = SimpleNamespace(), store  # type: ignore[assignment]
    return EngineHandle(cache)


async def test_an_episode_of_an_earlier_process_is_reopened_by_the_first_calls_whichever_is_first(
    handle: EngineHandle, store: Store
) -> None:
    store.save("t1", "old", [1, 2])
    store.save("t1", "new", [1, 2, 3])
    first, second = await asyncio.gather(*(handle._episode("t1", of_run=False) for _ in range(2)))
    assert first.head == second.head == "new" and store.listed == 2
    assert [version.version for version in first.history()] == ["new"]
    assert (await handle._episode("t1", of_run=False)).head == "new" and store.listed == 2  # it is open
    assert (await handle._episode("t2", of_run=False)).head is None


async def test_a_dropped_episode_that_a_fork_needs_versions_of_begins_anew(handle: EngineHandle, store: Store) -> None:
    store.save("t1", "old", [1, 2])
    fork = (await handle._episode("t1", of_run=False)).fork(name="fork")
    handle.cache._session.tracker.drop("t1")  # the store keeps what the fork needs
    assert (await handle._episode("t1", of_run=False)).head is None and fork.head == "old"


async def test_a_store_that_cannot_be_listed_is_told_of_once_and_fails_no_call(
    handle: EngineHandle, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.save("t1", "old", [1, 2])
    store.fault = "the server is gone"
    for thread in ("t1", "t2"):
        assert (await handle._episode(thread, of_run=False)).head is None
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.getMessage().startswith("episode 't1' begins anew") and "the server is gone" in said.getMessage()
    store.fault = None
    assert (await handle._episode("t1", of_run=False)).head == "old"
    store.fault = "again"
    await handle._episode("t3", of_run=False)
    assert "episode 't3' begins anew" in caplog.text


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_store_is_not_asked_for_the_episode_of_a_run_without_a_thread(
    handle: EngineHandle, store: Store, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def generate(self: Any, *_: Any, **__: Any) -> None:
        asked.append(self.id)

    async def stream(self: Any, *_: Any, **__: Any) -> Any:
        asked.append(self.id)
        yield None

    monkeypatch.setattr("agentcache.engine.episode.AsyncEpisode.generate", generate)
    monkeypatch.setattr("agentcache.engine.episode.AsyncEpisode.stream", stream)
    caller = Caller.__new__(Caller)
    caller.engine = handle
    router = Router()
    routes = [
        router.route([], metadata, "r1", episode=given)
        for metadata, given in (({}, None), ({"thread_id": "t1"}, None), ({}, "run-of-an-earlier-process"))
    ]
    for route in routes:
        call = Call([], {}, None, route, Run(), retries=0)
        if streamed:
            assert [piece async for piece in caller.pieces(call)] == [None]
        else:
            await caller.reply(call)
    assert asked == ["run-r1", "t1", "run-of-an-earlier-process"] and store.listed == 2
