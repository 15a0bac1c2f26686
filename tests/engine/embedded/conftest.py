"""The engine of the asynchronous façade that the tests of this folder share, all in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from agentcache import AsyncAgentCache
from tests.ending import ends_with
from tests.engine.embedded.calls import SETTINGS


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def cache(tiny: Callable[[str], Path], request: pytest.FixtureRequest) -> AsyncIterator[AsyncAgentCache]:
    """Returns a cache on the tiny llama. The last module of this folder kills its engine, restarts and closes it."""
    loop = asyncio.get_running_loop()

    def close() -> None:
        if not loop.is_closed():  # else no test followed, and the session's end has closed both
            loop.run_until_complete(cache.close())

    async with AsyncAgentCache(tiny("llama"), **SETTINGS) as cache:
        ends_with(request, Path(__file__).parent, close)
        yield cache
