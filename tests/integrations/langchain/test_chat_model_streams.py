"""Streams, calls in a form and batches of `ChatAgentCache` on a real engine, from any loop, and given up on the way."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from pydantic import BaseModel

from agentcache import AgentCache, AgentCacheError
from agentcache.integrations.langchain import ChatAgentCache
from agentcache.integrations.langchain.engine import EngineHandle
from tests.integrations.langchain.talk import ENDLESS, joined, report

pytestmark = pytest.mark.engine


async def test_a_stream_is_the_reply_in_parts(model: ChatAgentCache) -> None:
    whole = model.invoke("Name three colours.")
    chunks = list(model.stream("Name three colours."))
    assert len(chunks) > 2 and joined(chunks).content == whole.content
    assert joined([c async for c in model.astream("Name three colours.")]).content == whole.content
    assert [c.usage_metadata is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].chunk_position == "last" and chunks[-1].usage_metadata == whole.usage_metadata | {
        "input_token_details": chunks[-1].usage_metadata["input_token_details"]  # type: ignore[index]
    }
    assert joined(chunks).response_metadata.keys() == whole.response_metadata.keys()
    assert joined(chunks).response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def test_streaming_changes_no_reply(cache: AgentCache, model: ChatAgentCache) -> None:
    streaming = ChatAgentCache(cache=cache, policy="edit_local", max_tokens=6, streaming=True)
    assert streaming.invoke("Name three colours.").content == model.invoke("Name three colours.").content


def test_a_forced_calls_stream_is_the_call(model: ChatAgentCache) -> None:
    def weigh(item: int) -> int:
        """Weighs an item."""
        return item

    bound = model.bind_tools([weigh], tool_choice="weigh").bind(max_tokens=60)
    whole, streamed = bound.invoke("Weigh item 7."), joined(list(bound.stream("Weigh item 7.")))
    assert isinstance(whole, AIMessage)
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(c["name"], c["args"]) for c in streamed.tool_calls]
    assert whole.tool_calls[0]["name"] == "weigh" and isinstance(whole.tool_calls[0]["args"]["item"], int)
    assert whole.response_metadata["finish_reason"] == streamed.response_metadata["finish_reason"] == "tool_calls"
    assert whole.content == streamed.content == ""


def test_a_call_that_is_cut_is_invalid_and_says_why(model: ChatAgentCache, capfd: pytest.CaptureFixture[str]) -> None:
    class Weights(BaseModel):
        """Weights of items."""

        names: list[str]

    reply = model.bind_tools([Weights], tool_choice="any").bind(max_tokens=14).invoke("Weigh all items.")
    assert isinstance(reply, AIMessage) and reply.tool_calls == []
    assert [call["error"] for call in reply.invalid_tool_calls] == ["cut by max_tokens=14"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output_with_the_raw_message(model: ChatAgentCache, method: Any) -> None:
    class Weight(BaseModel):
        """The weight of an item."""

        grams: int

    bound = model.model_copy(update={"max_tokens": 60}).with_structured_output(Weight, method=method, include_raw=True)
    found = bound.invoke("Item 7 weighs 49 grams.")
    assert isinstance(found["parsed"], Weight) and found["parsing_error"] is None
    assert isinstance(found["raw"], AIMessage)


def meeting(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Makes requests wait until so many of them are in the engine's loop at once."""
    arrived = 0
    all_there = asyncio.Event()
    generate = EngineHandle.generate

    async def wait(self: EngineHandle, *arguments: Any) -> Any:
        nonlocal arrived
        arrived += 1
        if arrived == calls:
            all_there.set()
        async with asyncio.timeout(60):
            await all_there.wait()
        return await generate(self, *arguments)

    monkeypatch.setattr(EngineHandle, "generate", wait)


def test_a_batch_is_served_at_once(model: ChatAgentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"Count from {n}." for n in range(4)]
    single = [model.invoke(prompt).content for prompt in prompts]
    meeting(monkeypatch, 4)
    assert [reply.content for reply in model.batch(prompts)] == single


async def test_an_asynchronous_batch_is_served_at_once(model: ChatAgentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting(monkeypatch, 12)  # more than threads
    replies = await model.abatch([f"Count from {n}." for n in range(12)])
    assert len({report(reply)["episode"] for reply in replies}) == 12


def unfinished(cache: AgentCache) -> int:
    engine = cache._cache._session.engine
    assert engine is not None
    return int(engine.llm.get_num_unfinished_requests())


async def test_a_stream_that_is_given_up_is_aborted(cache: AgentCache, model: ChatAgentCache) -> None:
    endless = model.bind(max_tokens=1500, extra=ENDLESS)
    stream = endless.stream("Tell a story.")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert unfinished(cache) == 0
    astream = endless.astream("Tell a story.")
    await anext(astream)
    await astream.aclose()  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(endless.ainvoke("Tell a story."), 0.5)
    end = time.monotonic() + 60
    while unfinished(cache):
        assert time.monotonic() < end, "a request went on"
        await asyncio.sleep(0.05)


async def test_a_call_that_is_cancelled_cancels_its_request(
    model: ChatAgentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def wait(self: EngineHandle, *arguments: Any) -> Any:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    monkeypatch.setattr(EngineHandle, "generate", wait)
    call = asyncio.create_task(model.ainvoke("Hello"))
    assert await asyncio.to_thread(begun.wait, 30)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(cancelled.wait, 30)


def test_an_asynchronous_cache_is_reached_from_its_loop_and_from_others(cache: AgentCache) -> None:
    inner = cache._cache
    model = ChatAgentCache(cache=inner, max_tokens=4)
    there = model.invoke("Hello").content  # this thread has no loop

    async def at_home() -> tuple[Any, Any]:
        with pytest.raises(AgentCacheError, match="would wait for itself; use ainvoke"):
            model.invoke("Hello")
        chunks = [chunk async for chunk in model.astream("Hello")]
        return (await model.ainvoke("Hello")).content, joined(chunks).content

    assert cache._thread.call(at_home()) == (there, there)
