from __future__ import annotations

import pytest

from agentcache.store.tiers.conformance import CHECKS, Check, check_store
from tests.store.tiers.backends import DiskBackend, MemoryBackend


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory(check: Check) -> None:
    check_store(MemoryBackend, [check])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_disk(check: Check) -> None:
    check_store(DiskBackend, [check])
