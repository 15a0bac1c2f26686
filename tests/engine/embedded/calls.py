"""Prompts for the asynchronous façade, and when its engine is idle."""

from __future__ import annotations

import asyncio
from typing import Any

from agentcache import AsyncAgentCache

__all__ = ["ENDLESS", "LONG", "SETTINGS", "chat", "idle", "unfinished"]

SETTINGS = {"dtype": "float32", "kv_bytes": 64 << 20, "max_model_len": 2048, "policy": "edit_local"}
FACTS = [f"Fact {i}: item {i} weighs {7 * i} grams and stands on shelf {i % 5}." for i in range(24)]
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "extra": {"ignore_eos": True}}
LONG = list(range(100, 400))


def chat(result: str, *more: str) -> list[dict[str, Any]]:
    """A conversation whose tool result is `result`; `more` are later user turns."""
    return [
        {"role": "system", "content": "Answer from the documents."},
        {"role": "user", "content": "How heavy is item 7?", "id": "q"},
        {"role": "tool", "content": result, "tool_call_id": "c1"},
        {"role": "user", "content": " ".join(FACTS), "id": "facts"},
        *({"role": "user", "content": text} for text in more),
    ]


def unfinished(cache: AsyncAgentCache) -> int:
    engine = cache._session.engine
    assert engine is not None
    return int(engine.llm.get_num_unfinished_requests())


async def idle(cache: AsyncAgentCache) -> None:
    """Waits until neither the caller nor the engine holds a request: resetting the prefix cache needs every block free."""
    async with asyncio.timeout(60):
        while unfinished(cache) or not await cache.reset_prefix_cache():
            await asyncio.sleep(0.05)
