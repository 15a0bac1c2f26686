from __future__ import annotations

from typing import Literal

import pytest

from agentcache.store.tiers.conformance import CHECKS, Check, check_store
from tests.store.tiers.backends import DiskBackend, MemoryBackend, RedisBackend, TieredBackend
from tests.store.tiers.redis_process import RedisProcess


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory(check: Check) -> None:
    check_store(MemoryBackend, [check])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_disk(check: Check) -> None:
    check_store(DiskBackend, [check])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_redis(check: Check, redis_server: RedisProcess) -> None:
    check_store(lambda: RedisBackend(redis_server), [check])


@pytest.mark.parametrize("mode", ["through", "behind"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory_over_disk(check: Check, mode: Literal["through", "behind"]) -> None:
    check_store(lambda: TieredBackend(DiskBackend(), mode), [check])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory_over_redis(check: Check, redis_server: RedisProcess) -> None:
    check_store(lambda: TieredBackend(RedisBackend(redis_server), "behind"), [check])
