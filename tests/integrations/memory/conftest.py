"""The engine that the tests of this folder share, and its event log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache import AgentCache
from tests.ending import ends_with


@pytest.fixture(scope="package")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file of the engine's events."""
    return tmp_path_factory.mktemp("events") / "run.jsonl"


@pytest.fixture(scope="package")
def cache(smollm2_path: Path, log: Path, request: pytest.FixtureRequest) -> Iterator[AgentCache]:
    """Returns a cache on the real model; its default policy is the exact one."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_bytes": 256 << 20, "max_model_len": 2048}
    with AgentCache(smollm2_path, events=log, events_text=True, **settings) as cache:
        ends_with(request, Path(__file__).parent, cache.close)
        yield cache
