"""LangChain's conformance suites on a real SmolLM2; what they skip and why stands in `suite.py`."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from agentcache import AgentCache
from agentcache.integrations.langchain import ChatAgentCache
from tests.integrations.langchain.suite import Conformance

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def _running(cache: AgentCache) -> None:
    TestUnit.running = TestIntegration.running = cache


class TestUnit(ChatModelUnitTests):
    running: ClassVar[AgentCache]

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAgentCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"cache": self.running}


class TestIntegration(Conformance):
    pass
