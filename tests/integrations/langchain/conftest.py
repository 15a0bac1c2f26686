"""What SmolLM2 cannot do, and the engine of a model that can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcache import AgentCache
from agentcache.integrations.langchain import ChatAgentCache
from tests.integrations.langchain.suite import TOOL_MODEL, TOOL_MODEL_VARIABLE

SETTINGS = {
    "dtype": "float32",
    "kv_bytes": 256 << 20,
    "max_model_len": 2048,
    "policy": "edit_local",
    "connector": {"time_at_start": False},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what needs a model that calls a tool of its own accord: `test_tool_model.py` runs it on one.

    That module comes first here, so that its engine has ended when the one that the others share begins.
    """
    reason = f"SmolLM2 calls no tool unless it is forced to; {TOOL_MODEL_VARIABLE}=FOLDER names a model that does"
    for item in items:
        if item.path.name == "test_conformance.py" and item.name.startswith("test_agent_loop"):
            item.add_marker(pytest.mark.skip(reason=reason))
    here = [at for at, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    mine = sorted((items[at] for at in here), key=lambda item: item.path.name != "test_tool_model.py")
    for at, item in zip(here, mine, strict=True):
        items[at] = item


@pytest.fixture(scope="module")
def model(cache: AgentCache) -> ChatAgentCache:
    """Returns a chat model on the shared engine."""
    return ChatAgentCache(cache=cache, policy="edit_local", max_tokens=6, timeout=300)


@pytest.fixture(scope="module")
def tool_cache() -> Iterator[AgentCache]:
    assert TOOL_MODEL is not None
    with AgentCache(TOOL_MODEL, **SETTINGS) as cache:
        yield cache
