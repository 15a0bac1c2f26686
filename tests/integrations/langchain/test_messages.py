"""LangChain messages as chat dicts."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from agentcache import RenderError
from agentcache.integrations.langchain.messages import to_chat

CALL = {"name": "weigh", "args": {"item": 7, "unit": "g"}, "id": "c1", "type": "tool_call"}


def one(message: AnyMessage) -> dict[str, Any]:
    (chat,) = to_chat([message])
    return chat


def test_each_role_has_its_name_and_its_keys() -> None:
    messages = [
        SystemMessage("Be brief."),
        HumanMessage("Weigh item 7.", id="h1", name="ann"),
        AIMessage("", id="a1", tool_calls=[CALL]),
        ToolMessage("49", tool_call_id="c1", id="t1"),
        AIMessage("49 grams."),
    ]
    assert to_chat(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weigh item 7.", "name": "ann", "id": "h1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weigh", "arguments": {"item": 7, "unit": "g"}}}
            ],
            "id": "a1",
        },
        {"role": "tool", "content": "49", "tool_call_id": "c1", "name": "weigh"},
        {"role": "assistant", "content": "49 grams."},
    ]


def test_other_roles() -> None:
    assert one(ChatMessage("x", role="critic"))["role"] == "critic"
    assert one(FunctionMessage("49", name="weigh")) == {"role": "tool", "content": "49", "name": "weigh"}


def test_a_tools_own_name_stands() -> None:
    chat = to_chat([AIMessage("", tool_calls=[CALL]), ToolMessage("49", tool_call_id="c1", name="scales")])
    assert chat[1]["name"] == "scales"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (HumanMessage(["a", {"type": "text", "text": "b"}]), "a\nb"),
        (HumanMessage([{"type": "text-plain", "text": "a file", "mime_type": "text/plain"}]), "a file"),
        (ToolMessage([{"type": "text", "text": "49"}], tool_call_id="c1"), "49"),
        (
            AIMessage([{"type": "text", "text": "so"}, {"type": "tool_use", "id": "c1", "name": "weigh", "input": {}}]),
            "so",
        ),
        (AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "so"}]), "so"),
        (AIMessage([]), ""),
    ],
)
def test_blocks_become_text(message: AnyMessage, text: str) -> None:
    assert one(message)["content"] == text


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}},
        {"type": "image", "url": "https://example.org/x.png"},
        {"type": "audio", "base64": "xx"},
        {"type": "tool_result", "tool_use_id": "c1", "content": "49"},
        {"text": "no type"},
    ],
)
@pytest.mark.parametrize("kind", [HumanMessage, AIMessage])
def test_what_is_no_text_is_refused_with_its_place_and_type(kind: Any, block: dict[str, Any]) -> None:
    with pytest.raises(RenderError, match=rf"message 1 \(\w+\) holds a block of type '{block.get('type')}'.*text only"):
        to_chat([HumanMessage("look"), kind([block])])


def test_a_message_of_no_role_is_refused() -> None:
    with pytest.raises(RenderError, match="message 0 is a RemoveMessage"):
        to_chat([RemoveMessage(id="x")])


@pytest.mark.parametrize(
    "message",
    [
        AIMessage("so", additional_kwargs={"reasoning_content": "hm"}),
        AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "so"}]),
        AIMessage([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]),
    ],
)
def test_reasoning_stands_where_templates_look_for_it(message: AIMessage) -> None:
    chat = one(message)
    assert [chat.get(key) for key in ("reasoning_content", "reasoning", "thinking")] == ["hm"] * 3


def test_arguments_that_are_no_json_stay_what_the_model_wrote() -> None:
    broken = {"name": "weigh", "args": '{"item": ', "id": "c2", "error": "x", "type": "invalid_tool_call"}
    chat = one(AIMessage("", tool_calls=[CALL], invalid_tool_calls=[broken]))
    arguments = [call["function"]["arguments"] for call in chat["tool_calls"]]
    assert arguments == [{"item": 7, "unit": "g"}, '{"item": ']


def test_a_middlewares_message_has_its_source_as_tag() -> None:
    assert one(HumanMessage("Summary: …", additional_kwargs={"lc_source": "summarization"}))["tags"] == [
        "summarization"
    ]


def test_messages_are_not_changed() -> None:
    message = AIMessage("", tool_calls=[CALL])
    before = message.model_dump_json()
    one(message)["content"] = "changed"
    assert message.model_dump_json() == before
