from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.tiers.redis_process import RedisProcess


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisProcess]:
    """One server for the whole session, without persistence; tests that kill a server start their own."""
    server = RedisProcess("--save", "", "--appendonly", "no")
    yield server
    server.close()
