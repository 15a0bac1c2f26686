"""The thread under the synchronous face: calls end however they are interrupted."""

import asyncio
import threading
from concurrent.futures import CancelledError, wait

import pytest

from agentcache.cache import _LoopThread
from agentcache.errors import AgentCacheError


@pytest.fixture
def thread():
    thread = _LoopThread()
    yield thread
    thread.stop()


async def give(value):
    await asyncio.sleep(0)
    return value


async def fail():
    raise ValueError("no")


def test_a_call_returns_or_raises_what_the_coroutine_does(thread):
    assert thread.call(give(3)) == 3
    with pytest.raises(ValueError, match="no"):
        thread.call(fail())


def test_a_call_that_is_cancelled_before_its_first_step_ends(thread):
    """The loop is busy when the interrupt comes: the coroutine never runs, and nobody waits for its `finally`."""
    busy = threading.Event()
    thread._loop.call_soon_threadsafe(busy.wait)
    future, cancel = thread._start(give(1))
    cancel()
    busy.set()
    assert not wait([future], timeout=10).not_done
    with pytest.raises(CancelledError):
        future.result()


def test_an_iteration_that_is_closed_early_closes_its_source(thread):
    closed = threading.Event()

    async def numbers():
        try:
            for i in range(1000):
                yield i
                await asyncio.sleep(0)
        finally:
            closed.set()

    items = thread.iterate(numbers())
    assert next(items) == 0
    items.close()
    assert closed.wait(10)


def test_an_iteration_raises_what_its_source_does_after_its_items(thread):
    async def numbers():
        yield 1
        raise ValueError("no")

    items = thread.iterate(numbers())
    assert next(items) == 1
    with pytest.raises(ValueError, match="no"):
        next(items)


def test_a_closed_thread_refuses_calls(thread):
    thread.stop()
    with pytest.raises(AgentCacheError, match="closed"):
        thread.call(give(1))
