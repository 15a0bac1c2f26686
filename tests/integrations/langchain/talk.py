"""A conversation about what a tool weighs, and what a chat model's replies say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage

__all__ = ["ENDLESS", "FACTS", "conversation", "joined", "report", "thread"]

FACTS = " ".join(f"Item {i} weighs {7 * i} grams and stands on shelf {i % 5}." for i in range(24))
ENDLESS = {"ignore_eos": True}


def conversation(result: str, *more: BaseMessage) -> list[BaseMessage]:
    """A tool's result, `result`, before a long text, and later turns."""
    call = {"name": "weigh", "args": {"item": 7}, "id": "c1", "type": "tool_call"}
    return [
        SystemMessage("Answer from the facts."),
        HumanMessage("How heavy is item 7?", id="q"),
        AIMessage("", tool_calls=[call], id="a"),
        ToolMessage(result, tool_call_id="c1"),
        HumanMessage(FACTS, id="facts"),
        *more,
    ]


def thread(name: str, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"thread_id": name, **metadata}}


def report(message: BaseMessage) -> dict[str, Any]:
    found: dict[str, Any] = message.response_metadata["agentcache"]
    return found


def joined(chunks: Sequence[BaseMessage]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk  # type: ignore[assignment]
    assert isinstance(whole, AIMessageChunk)
    return whole
