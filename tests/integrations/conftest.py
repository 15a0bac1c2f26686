"""The engine of the real model that the tests of this folder share, and its event log: it takes longer to start than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcache import AgentCache
from tests.ending import ends_with


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file of the engine's events."""
    return tmp_path_factory.mktemp("events") / "run.jsonl"


@pytest.fixture(scope="session")
def cache(smollm2_path: Path, log: Path, request: pytest.FixtureRequest) -> Iterator[AgentCache]:
    """Returns a cache on the real model; its default policy is the exact one."""
    with AgentCache(
        smollm2_path,
        dtype="float32",
        kv_bytes=512 << 20,
        max_model_len=8192,
        events=log,
        events_text=True,
        connector={"attention": True, "time_at_start": False},
    ) as cache:
        ends_with(request, Path(__file__).parent, cache.close)
        yield cache
