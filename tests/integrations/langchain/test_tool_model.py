"""LangChain's conformance suite on a model that calls tools of its own accord."""

from __future__ import annotations

import pytest

from agentcache import AgentCache
from tests.integrations.langchain.suite import TOOL_MODEL, TOOL_MODEL_VARIABLE, Conformance

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(TOOL_MODEL is None, reason=f"{TOOL_MODEL_VARIABLE} names no folder of a model that calls tools"),
]


@pytest.fixture(scope="module", autouse=True)
def _running(tool_cache: AgentCache) -> None:
    TestToolModel.running = tool_cache


class TestToolModel(Conformance):
    @property
    def supports_json_mode(self) -> bool:
        return True
