"""Calls of `ChatAgentCache` that fail: requests tried again, and what is refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from agentcache import AgentCache, ConfigError, RenderError, RequestError, RequestTimeout
from agentcache.integrations.langchain import ChatAgentCache
from agentcache.integrations.langchain.engine import EngineHandle
from tests.integrations.langchain.talk import ENDLESS

pytestmark = pytest.mark.engine


def failing(monkeypatch: pytest.MonkeyPatch, times: int, error: Exception) -> list[int]:
    """Makes the next requests fail; returns the list that counts the tries."""
    generate, tries = EngineHandle.generate, []

    async def fail(self: EngineHandle, *arguments: Any) -> Any:
        tries.append(1)
        if len(tries) <= times:
            raise error
        return await generate(self, *arguments)

    monkeypatch.setattr(EngineHandle, "generate", fail)
    return tries


def test_a_request_that_fails_is_tried_again(model: ChatAgentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = failing(monkeypatch, 2, RequestError("the request failed"))
    assert model.invoke("Hello").content and len(tries) == 3


def test_the_last_failure_is_raised(model: ChatAgentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = failing(monkeypatch, 9, RequestError("the request failed"))
    with pytest.raises(RequestError, match="the request failed"):
        model.model_copy(update={"max_retries": 1}).invoke("Hello")
    assert len(tries) == 2


def test_a_request_that_takes_too_long_is_not_tried_again(model: ChatAgentCache) -> None:
    with pytest.raises(RequestTimeout, match=r"timeout=0.2 s"):
        model.invoke("Tell a story.", timeout=0.2, max_tokens=1500, extra=ENDLESS)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"nonsense": 1}, "unknown argument nonsense=1 of a call"),
        ({"model": "other"}, r"runs '.*', not 'other'"),
        ({"policy": "nope"}, "nope"),
        ({"temperature": -1.0}, "temperature"),
        ({"extra": {"nonsense": 1}}, "nonsense"),
        ({"response_format": {"type": "json_object"}, "extra": {"structured_outputs": 1}}, "structured_outputs"),
    ],
)
def test_a_bad_argument_of_a_call(model: ChatAgentCache, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        model.invoke("Hello", **arguments)


def test_a_picture_is_refused(model: ChatAgentCache) -> None:
    with pytest.raises(RenderError, match="'image_url', and the model reads text only"):
        model.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])])


def test_tools_without_a_parser_are_refused_when_they_are_bound(cache: AgentCache) -> None:
    model = ChatAgentCache(cache=cache, tool_parser="none")
    with pytest.raises(ConfigError, match="no parser is known for the tool calls"):
        model.bind_tools([{"name": "x", "description": "", "parameters": {"type": "object", "properties": {}}}])
    assert model.profile is not None and not model.profile["tool_calling"]
    assert model.bind_tools([]).invoke("Hello", max_tokens=1).content is not None


def test_a_template_without_tools_is_said_once(cache: AgentCache, caplog: pytest.LogCaptureFixture) -> None:
    model = ChatAgentCache(cache=cache, max_tokens=1).bind_tools(
        [{"name": "x", "description": "", "parameters": {"type": "object", "properties": {}}}]
    )
    for _ in range(2):
        model.invoke("Hello")
    assert [record.message for record in caplog.records if "shows no tools" in record.message] == [
        f"the chat template of {cache.config.model!r} shows no tools: the model does not know of them, and calls one only when "
        "it must"
    ]
