"""LangChain messages as the chat dicts that templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from agentcache.errors import RenderError

__all__ = ["to_chat"]

_ROLES: Final[dict[type[BaseMessage], str]] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}

_TEXTS: Final = {"text": "text", "text-plain": "text", "refusal": "refusal"}
"""Blocks that are text, and the key that it stands under."""

_THOUGHTS: Final = {"reasoning": "reasoning", "thinking": "thinking"}
"""Blocks of an assistant's reasoning, and the key that it stands under."""

_REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking")
"""Where templates look for an assistant's reasoning; each reads one of them."""

_CALLS: Final = frozenset(
    {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call", "input_json_delta"}
)
"""Blocks that repeat what stands in an assistant's `tool_calls`."""


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Returns messages as dicts with `role`, `content` as text, and whatever else applies.

    That is `tool_calls` (arguments as values: the renderer writes them as JSON where a template wants that), `tool_call_id`, `name`,
    `reasoning_content`, `id`, and as `tags` the `lc_source` that names the middleware which wrote a message.

    Raises:
        RenderError: A message is of no role that a chat has, or holds something else than text.
    """
    names = {
        call["id"]: call["name"]
        for message in messages
        if isinstance(message, AIMessage)
        for call in (*message.tool_calls, *message.invalid_tool_calls)
    }
    return [_to_dict(index, message, names) for index, message in enumerate(messages)]


def _to_dict(index: int, message: BaseMessage, names: Mapping[str | None, str | None]) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": _role(index, message), "content": _text(index, message)}
    name = message.name
    if isinstance(message, AIMessage):
        if thoughts := _thoughts(message):
            chat |= dict.fromkeys(_REASONING_KEYS, thoughts)
        if calls := _tool_calls(message):
            chat["tool_calls"] = calls
    elif isinstance(message, ToolMessage):
        chat["tool_call_id"] = message.tool_call_id
        name = name or names.get(message.tool_call_id)
    if name:
        chat["name"] = name
    if message.id is not None and not isinstance(message, ToolMessage):
        chat["id"] = message.id
    if (source := message.additional_kwargs.get("lc_source")) is not None:
        chat["tags"] = [str(source)]
    return chat


def _role(index: int, message: BaseMessage) -> str:
    if (known := _ROLES.get(type(message))) is not None:
        return known
    if isinstance(message, ChatMessage):
        return str(message.role)
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise RenderError(
        f"message {index} is a {type(message).__name__}, which no chat has; pass system, human, AI and tool messages"
    )


def _text(index: int, message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
            continue
        kind = str(block.get("type"))
        text = block.get(_TEXTS[kind]) if kind in _TEXTS else None
        if isinstance(text, str):
            texts.append(text)
        elif not (isinstance(message, AIMessage) and (kind in _CALLS or kind in _THOUGHTS)):
            raise RenderError(
                f"message {index} ({message.type}) holds a block of type {kind!r}, and the model reads text only; pass text "
                "blocks, or describe it in words"
            )
    return "\n".join(texts)


def _thoughts(message: AIMessage) -> str | None:
    kept = message.additional_kwargs.get("reasoning_content")
    if isinstance(kept, str):
        return kept
    blocks = [block for block in message.content if isinstance(block, dict)]
    found = [block.get(_THOUGHTS[kind]) for block in blocks if (kind := str(block.get("type"))) in _THOUGHTS]
    return "\n".join(text for text in found if isinstance(text, str)) or None


def _tool_calls(message: AIMessage) -> list[dict[str, Any]]:
    # Arguments that are no JSON stay the text that the model wrote.
    calls = [*message.tool_calls, *message.invalid_tool_calls]
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"] or "", "arguments": call["args"] if call["args"] is not None else ""},
        }
        for call in calls
    ]
