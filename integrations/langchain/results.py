"""Replies as LangChain's messages and chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from agentcache.integrations.langchain.forms import CallPart, Parsed
from agentcache.integrations.routing import Route
from agentcache.reply import Reply

__all__ = ["PROVIDER", "ai_message", "last_chunk", "new_chunk", "report", "response_metadata", "usage"]

PROVIDER: Final = "agentcache"
"""LangChain's name of where the model runs."""


def ai_message(
    parsed: Parsed, usage: UsageMetadata, metadata: dict[str, Any], *, cut_at: int | None = None
) -> AIMessage:
    """Returns a whole reply; calls whose arguments are no JSON object are invalid tool calls, which say why.

    Args:
        parsed: The reply.
        usage: Its tokens.
        metadata: Its metadata.
        cut_at: The limit of tokens that ended it, if one did.
    """
    calls, broken = _tool_calls(parsed.calls, cut_at)
    return AIMessage(
        content=parsed.content,
        additional_kwargs={"reasoning_content": parsed.reasoning} if parsed.reasoning else {},
        tool_calls=calls,
        invalid_tool_calls=broken,
        usage_metadata=usage,
        response_metadata=metadata,
    )


def new_chunk(parsed: Parsed) -> ChatGenerationChunk:
    """Returns what is new in a stream."""
    message = AIMessageChunk(
        content=parsed.content,
        additional_kwargs={"reasoning_content": parsed.reasoning} if parsed.reasoning else {},
        tool_call_chunks=[
            tool_call_chunk(name=call.name, args=call.arguments, id=call.id, index=call.index) for call in parsed.calls
        ],
    )
    return ChatGenerationChunk(message=message)


def last_chunk(usage: UsageMetadata, metadata: dict[str, Any]) -> ChatGenerationChunk:
    """Returns the end of a stream: the only chunk with usage and metadata."""
    message = AIMessageChunk(content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last")
    return ChatGenerationChunk(message=message)


def usage(reply: Reply, reasoning_tokens: int | None) -> UsageMetadata:
    """Returns a reply's tokens; `cache_read` counts the prompt's that the engine did not compute."""
    found = UsageMetadata(
        input_tokens=reply.prompt_tokens,
        output_tokens=len(reply.token_ids),
        total_tokens=reply.prompt_tokens + len(reply.token_ids),
        input_token_details=InputTokenDetails(cache_read=min(reply.cached_tokens, reply.prompt_tokens)),
    )
    if reasoning_tokens is not None:
        found["output_token_details"] = OutputTokenDetails(reasoning=reasoning_tokens)
    return found


def response_metadata(model: str, reply: Reply, *, called: bool, report: dict[str, Any]) -> dict[str, Any]:
    """Returns a reply's metadata.

    Args:
        model: The model's name.
        reply: The engine's.
        called: Whether it calls a tool.
        report: How its KV came to be.
    """
    finished = called and reply.finish_reason == "stop"
    return {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": "tool_calls" if finished else reply.finish_reason,
        "agentcache": report,
    }


def report(route: Route, reply: Reply, kind: str | None) -> dict[str, Any]:
    """Returns a reply's recovery report as JSON values.

    Besides the fields of `RecoveryReport` it has `episode`, `version`, `parent`, `kind` (why the prompt differs from its parent),
    `cached_tokens` and `ttft_ms`; for a call that belongs to no episode these alone, and `aside`: why.
    """
    values: dict[str, Any] = {
        "episode": route.episode,
        "version": reply.version,
        "parent": reply.parent,
        "kind": kind,
        "cached_tokens": reply.cached_tokens,
        "ttft_ms": reply.ttft_ms,
    }
    if route.episode is None:
        values["aside"] = route.reason
    if reply.recovery is None:
        return values
    return reply.recovery.model_dump(mode="json") | values


def _tool_calls(parts: Sequence[CallPart], cut_at: int | None) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    calls: list[ToolCall] = []
    broken: list[InvalidToolCall] = []
    error = "the arguments are no JSON object" if cut_at is None else f"cut by max_tokens={cut_at}"
    for part in parts:
        # Some forms write nothing for no arguments.
        text = part.arguments if part.arguments.strip() or cut_at is not None else "{}"
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = None
        if isinstance(arguments, dict) and part.name:
            calls.append(tool_call(name=part.name, args=arguments, id=part.id))
        else:
            broken.append(invalid_tool_call(name=part.name, args=part.arguments, id=part.id, error=error))
    return calls, broken
