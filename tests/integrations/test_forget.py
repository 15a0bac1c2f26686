"""Dropping a thread's episodes from wherever the caller is: the cache's loop runs elsewhere, or here."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from agentcache import AsyncAgentCache, StoreError
from agentcache.integrations.routing import Route, Router
from tests.integrations.routed import RoutedModel


class Cache:
    """What a router needs of a cache: a loop, and episodes that note where they were dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None, error: Exception | None = None) -> None:
        self._session = SimpleNamespace(loop=loop)
        self.pids = [1] if loop is not None else []
        self.dropped: list[tuple[str, bool]] = []
        self.error = error

    def episode(self, name: str) -> Any:
        async def drop() -> None:
            await asyncio.sleep(0.01)
            self.dropped.append((name, asyncio.get_running_loop() is self._session.loop))
            if self.error is not None:
                raise self.error

        return SimpleNamespace(drop=drop)


@pytest.fixture
def elsewhere() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def used(cache: Cache) -> Router:
    """A router with a thread `t1` of one episode."""
    router = Router(cache)  # type: ignore[arg-type]
    RoutedModel(router=router).invoke("one", {"metadata": {"thread_id": "t1"}})
    return router


def test_forgetting_waits_for_the_caches_loop(elsewhere: asyncio.AbstractEventLoop) -> None:
    cache = Cache(elsewhere)
    assert used(cache).forget("t1") == ("t1",)
    assert cache.dropped == [("t1", True)]


async def test_forgetting_is_awaited_from_another_loop(elsewhere: asyncio.AbstractEventLoop) -> None:
    cache = Cache(elsewhere)
    await used(cache).aforget("t1")
    assert cache.dropped == [("t1", True)]


async def test_on_the_caches_own_loop_forgetting_is_awaited_or_only_begun() -> None:
    cache = Cache(asyncio.get_running_loop())
    await used(cache).aforget("t1")
    assert cache.dropped == [("t1", True)]
    used(cache).forget("t1")  # it would wait for itself
    assert len(cache.dropped) == 1
    await asyncio.sleep(0.1)
    assert len(cache.dropped) == 2


async def test_a_store_that_cannot_be_changed_is_told_and_logged(
    elsewhere: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(elsewhere, StoreError("the disk is gone"))
    router = used(cache)
    with caplog.at_level(logging.WARNING), pytest.raises(StoreError, match="the disk is gone"):
        await asyncio.to_thread(router.forget, "t1")
    async with asyncio.timeout(10):  # it is logged on the cache's own thread
        while "its KV was not freed: the disk is gone" not in caplog.text:
            await asyncio.sleep(0.01)
    with pytest.raises(StoreError):
        await router.aforget("t1")


async def test_what_a_call_leaves_of_a_thread_that_was_forgotten_while_it_ran_is_dropped() -> None:
    cache = Cache(asyncio.get_running_loop())
    router = Router(cache)  # type: ignore[arg-type]
    thread = {"thread_id": "t1"}

    def begun() -> Route:
        return router.route([HumanMessage("one")], thread, "r")

    for ended in (lambda r: router.ended(r, "v1", AIMessage("ok")), router.failed):
        route = begun()
        await router.aforget("t1")
        del cache.dropped[:]
        ended(route)
        await asyncio.sleep(0.1)
        assert cache.dropped == [("t1", True)]
    # A thread that has begun anew meanwhile keeps what is its own.
    del cache.dropped[:]
    route = begun()
    await router.aforget("t1")
    again = begun()
    router.failed(route)
    router.failed(again)
    await asyncio.sleep(0.1)
    assert again.episode == "t1" and len(cache.dropped) == 1


def test_without_an_engine_there_is_nothing_to_free() -> None:
    cache = Cache(None)
    router = used(cache)
    assert router.forget("t1") == ("t1",) and cache.dropped == []


def test_a_cache_has_one_router_and_neither_keeps_the_other() -> None:
    cache: Any = AsyncAgentCache()
    router = Router.of(cache)
    assert Router.of(cache) is router and router.cache is cache
    assert Router.of(AsyncAgentCache()) is not router
    del cache
    gc.collect()
    assert router.cache is None and router.forget("t1") == ("t1",)
