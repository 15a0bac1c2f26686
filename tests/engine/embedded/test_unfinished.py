"""Requests that do not end well, up to the engine's death: the last module of this folder, for it replaces the engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentcache import AgentCacheError, AsyncAgentCache, EngineDeadError, RequestTimeout
from tests.engine.embedded.calls import ENDLESS, LONG, SETTINGS, chat, idle, unfinished

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_cancelling_a_task_aborts_its_request_and_the_episode_goes_on(cache: AsyncAgentCache) -> None:
    episode = cache.episode("cancel")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    task = asyncio.create_task(episode.generate(chat("13 grams"), **ENDLESS))
    while not unfinished(cache):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert unfinished(cache) == 0
    await idle(cache)
    after = await episode.generate(chat("14 grams"), max_tokens=2)
    assert after.parent == first.version and after.recovery is not None and after.recovery.reason is None
    assert [r.recovery is None for r in episode.history()] == [False, True, False]


async def test_closing_a_stream_aborts_its_request(cache: AsyncAgentCache) -> None:
    episode = cache.episode("closed stream")
    chunks = episode.stream(chat("12 grams"), **ENDLESS)
    first = await anext(chunks)
    await chunks.aclose()
    assert unfinished(cache) == 0
    await idle(cache)
    (record,) = episode.history()
    assert record.reply_tokens == len(first.token_ids) > 0


async def test_a_timeout_aborts_its_request_and_frees_its_blocks(cache: AsyncAgentCache) -> None:
    with pytest.raises(RequestTimeout, match=r"timeout=0\.05 s"):
        await cache.episode("timeout").generate(chat("12 grams"), timeout=0.05, **ENDLESS)
    assert unfinished(cache) == 0
    await idle(cache)


async def test_a_timeout_that_is_not_reached_changes_nothing(cache: AsyncAgentCache) -> None:
    reply = await cache.generate(LONG, max_tokens=4, timeout=600)
    assert len(reply.token_ids) == 4


# -- the engine's death ------------------------------------------------------------------------------------------------


async def test_a_dead_engine_is_a_clear_error_and_a_restart_keeps_the_history(cache: AsyncAgentCache) -> None:
    episode = cache.episode("death")
    first = await episode.generate(chat("12 grams"), max_tokens=2)
    pids = cache.pids
    open_request = asyncio.create_task(episode.generate(chat("13 grams"), **ENDLESS))
    while not unfinished(cache):
        await asyncio.sleep(0.01)
    assert len(pids) == 1  # the worker lives in EngineCore
    os.kill(pids[0], signal.SIGKILL)
    async with asyncio.timeout(120):
        with pytest.raises(EngineDeadError, match=r"has died.*cache\.restart\(\)"):
            await open_request
    with pytest.raises(EngineDeadError, match="has died"):
        await cache.generate(LONG, max_tokens=1)
    with pytest.raises(EngineDeadError, match="has died"):
        await cache.stats()
    await cache.restart()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert set(cache.pids).isdisjoint(pids)
    after = await episode.generate(chat("49 grams"), max_tokens=2)
    assert after.parent == first.version and after.recovery is not None and after.recovery.exact
    assert "is unknown or was evicted" in str(after.recovery.reason)
    again = await episode.generate(chat("50 grams"), max_tokens=2)
    assert again.parent == after.version and again.recovery is not None and again.recovery.reused_tokens > 0
    assert len(episode.history()) == 4


@pytest.mark.slow
async def test_a_worker_in_a_process_of_its_own_that_dies_is_a_clear_error_too(tiny: Callable[[str], Path]) -> None:
    own = {"engine_args": {"distributed_executor_backend": "mp"}}
    async with AsyncAgentCache(tiny("llama"), **SETTINGS, **own) as cache:
        core, worker = cache.pids
        open_request = asyncio.create_task(cache.generate(LONG, **ENDLESS))
        while not unfinished(cache):
            await asyncio.sleep(0.01)
        os.kill(worker, signal.SIGKILL)
        async with asyncio.timeout(120):
            with pytest.raises(EngineDeadError, match=r"has died.*cache\.restart\(\)"):
                await open_request
        await cache.restart()
        assert set(cache.pids).isdisjoint((core, worker)) and not psutil.pid_exists(core)


async def test_closing_twice_leaves_no_process_and_open_requests_fail(cache: AsyncAgentCache) -> None:
    pids = cache.pids
    assert pids and all(psutil.pid_exists(pid) for pid in pids)
    open_request = asyncio.create_task(cache.generate(LONG, **ENDLESS))
    while not unfinished(cache):
        await asyncio.sleep(0.01)
    await cache.close()
    await cache.close()
    with pytest.raises(EngineDeadError, match="was stopped"):
        await open_request
    assert not any(psutil.pid_exists(pid) for pid in pids) and cache.pids == []
    with pytest.raises(AgentCacheError, match="not started or is closed"):
        await cache.generate(LONG)
