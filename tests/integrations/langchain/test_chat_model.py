"""`ChatAgentCache` on a real engine: episodes, streams, batches, loops, errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tracers._streaming import _StreamingCallbackHandler
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from pydantic import BaseModel

from agentcache import (
    AgentCache,
    AgentCacheError,
    ConfigError,
    RenderError,
    RequestError,
    RequestTimeout,
)
from agentcache.integrations.langchain import ChatAgentCache, chat_model
from agentcache.integrations.langchain.engine import EngineHandle
from agentcache.integrations.langchain.messages import to_chat

pytestmark = pytest.mark.engine

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


@pytest.fixture(scope="module")
def model(cache: AgentCache) -> ChatAgentCache:
    return ChatAgentCache(cache=cache, policy="edit_local", max_tokens=6, timeout=300)


def report(message: BaseMessage) -> dict[str, Any]:
    found: dict[str, Any] = message.response_metadata["agentcache"]
    return found


def joined(chunks: Sequence[BaseMessage]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk  # type: ignore[assignment]
    assert isinstance(whole, AIMessageChunk)
    return whole


# -- episodes ----------------------------------------------------------------------------------------------------------


def test_a_threads_second_call_goes_on_with_its_episode(model: ChatAgentCache) -> None:
    first = model.invoke([HumanMessage(FACTS)], thread("on"))
    second = model.invoke([HumanMessage(FACTS), first, HumanMessage("And item 8?")], thread("on"))
    assert (
        report(second)["episode"] == report(first)["episode"] and report(second)["parent"] == report(first)["version"]
    )
    assert (report(first)["kind"], report(second)["kind"]) == ("first", "append")
    assert second.usage_metadata is not None and second.usage_metadata["input_token_details"]["cache_read"] > 200
    assert second.usage_metadata["input_token_details"]["cache_read"] <= second.usage_metadata["input_tokens"]


def test_an_edit_in_the_middle_is_recovered(model: ChatAgentCache) -> None:
    model.invoke(conversation("12 grams"), thread("edit"))
    reply = model.invoke(conversation("49 grams, as was measured twice"), thread("edit"))
    found = report(reply)
    assert (found["policy"], found["kind"], found["exact"]) == ("edit_local", "tool_result", False)
    assert found["reused_tokens"] > 200 and found["prompt_tokens"] == reply.usage_metadata["input_tokens"]  # type: ignore[index]


def test_the_exact_policys_reply_is_that_of_vllm_alone(cache: AgentCache, model: ChatAgentCache) -> None:
    exact = ChatAgentCache(cache=cache, max_tokens=16, policy="prefix_cache")
    exact.invoke(conversation("12 grams"), thread("exact"))
    edited = conversation("49 grams by now")
    reply = exact.invoke(edited, thread("exact"))
    assert report(reply)["exact"] and report(reply)["reused_tokens"] == 0 and report(reply)["parent"]
    assert cache.flush() and cache.reset_prefix_cache()
    plain = cache.generate(to_chat(edited), max_tokens=16)
    assert plain.cached_tokens == 0 and reply.content == plain.text


def test_what_a_call_says_comes_before_what_the_model_says(model: ChatAgentCache) -> None:
    model.invoke(conversation("12 grams"), thread("says"))
    found = report(model.invoke(conversation("50 grams"), thread("says"), policy="direct_reuse"))
    assert found["policy"] == "direct_reuse" and found["repair_tokens"] == 0
    longer = model.bind(max_tokens=9, extra=ENDLESS).invoke("Hello")
    assert longer.usage_metadata["output_tokens"] == 9


def test_an_episode_may_be_named_and_its_parent(cache: AgentCache, model: ChatAgentCache) -> None:
    first = model.invoke(conversation("12 grams"), episode="mine")
    model.invoke(conversation("13 grams"), episode="mine")
    third = model.invoke(conversation("14 grams"), episode="mine", parent=report(first)["version"])
    assert report(third)["episode"] == "mine" and report(third)["parent"] == report(first)["version"]
    assert next(v.version for v in cache.episode("mine").history()) == report(first)["version"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_middlewares_own_call_is_set_aside_and_exact(model: ChatAgentCache, streamed: bool) -> None:
    config = thread("aside", lc_source="summarization")
    reply = joined(list(model.stream("Sum up.", config))) if streamed else model.invoke("Sum up.", config)
    found = report(reply)
    assert found["episode"] is None and found["version"] is None and "lc_source=summarization" in found["aside"]


class Tokens(BaseCallbackHandler, _StreamingCallbackHandler[Any]):
    """A handler that makes `invoke` stream, as LangGraph's `stream_mode="messages"` does."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.tokens.append(token)

    def tap_output_iter(self, run_id: Any, output: Any) -> Any:
        return output

    def tap_output_aiter(self, run_id: Any, output: Any) -> Any:
        return output


async def test_every_way_to_call_finds_its_thread(model: ChatAgentCache) -> None:
    prompt = [HumanMessage(FACTS)]
    episode = report(model.invoke(prompt, thread("ways")))["episode"]
    handler = Tokens()
    replies = [
        model.invoke(prompt, thread("ways") | {"callbacks": [handler]}),
        joined(list(model.stream(prompt, thread("ways")))),
        await model.ainvoke(prompt, thread("ways")),
        await model.ainvoke(prompt, thread("ways") | {"callbacks": [handler]}),
        joined([chunk async for chunk in model.astream(prompt, thread("ways"))]),
        model.batch([prompt], thread("ways"))[0],
    ]
    assert [report(reply)["episode"] for reply in replies] == [episode] * len(replies)
    assert "".join(handler.tokens) == 2 * str(replies[0].content)


# -- streams and batches -----------------------------------------------------------------------------------------------


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


# -- failures ----------------------------------------------------------------------------------------------------------


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


# -- construction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"nonsense": 1}, "unknown argument nonsense=1"),
        ({"polcy": "edit_local"}, "did you mean policy"),
        ({"temperature": -1}, "temperature=-1"),
        ({"dtype": "float32"}, "dtype='float32' is a setting of the cache, which runs already"),
        ({"settings": {"dtype": "float32"}}, "settings=.* is a setting of the cache"),
        ({"model": "other"}, "model='other', but this cache runs"),
        ({"tool_parser": "nope"}, "no tool_parser 'nope'"),
    ],
)
def test_bad_arguments_beside_a_cache(cache: AgentCache, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ChatAgentCache(cache=cache, **arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"polcy": "x"}, "did you mean policy"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"cache": 7}, "cache=7 is no AgentCache"),
    ],
)
def test_bad_arguments_are_known_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(chat_model, "AgentCache", lambda *_, **__: pytest.fail("an engine was started"))
    with pytest.raises(ConfigError, match=reason):
        ChatAgentCache(**arguments)


def test_a_model_by_settings_starts_its_engine_and_ends_it(cache: AgentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Started(AgentCache):
        """The running cache in the place of one that starts."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self._cache, self._thread = cache._cache, cache._thread
            told.append((arguments, settings))

        def close(self) -> None:
            told.append("closed")

    monkeypatch.setattr(chat_model, "AgentCache", Started)
    with ChatAgentCache(
        model="smollm2", policy="edit_local", policy_options={"k": 8}, dtype="float32", seed=1
    ) as model:
        assert model.invoke("Hello", max_tokens=1).response_metadata["model_name"] == cache.config.model
        assert told == [(("smollm2",), {"policy": "edit_local", "policy_options": {"k": 8}, "dtype": "float32"})]
    assert told[1:] == ["closed"]


def test_a_cache_that_is_given_stays_open(cache: AgentCache) -> None:
    with ChatAgentCache(cache=cache) as model:
        pass
    assert model.invoke("Hello", max_tokens=1) is not None


# -- what is known of the model ----------------------------------------------------------------------------------------


def test_tokens_are_counted_as_the_engine_counts_them(model: ChatAgentCache) -> None:
    messages = conversation("12 grams")
    counted = model.get_num_tokens_from_messages(messages)
    assert model.invoke(messages).usage_metadata["input_tokens"] == counted  # type: ignore[index]
    assert model.get_num_tokens_from_messages([]) == 0
    assert model.get_num_tokens("Hello there") == len(model.get_token_ids("Hello there")) > 0


def test_the_profile_leaves_room_for_the_reply(cache: AgentCache, model: ChatAgentCache) -> None:
    assert model.profile is not None
    assert model.profile["max_input_tokens"] + model.profile["max_output_tokens"] == 8192
    assert model.profile["tool_calling"] and not model.profile["image_inputs"]
    assert ChatAgentCache(cache=cache).profile["max_input_tokens"] == 6144  # type: ignore[index]
    assert ChatAgentCache(cache=cache, profile={"max_input_tokens": 9}).profile == {"max_input_tokens": 9}


def test_provider_and_model_are_the_same_in_traces_and_replies(model: ChatAgentCache) -> None:
    traced, metadata = model._get_ls_params(), model.invoke("Hello").response_metadata
    assert traced["ls_provider"] == metadata["model_provider"] == "agentcache"
    assert traced["ls_model_name"] == metadata["model_name"] == model.model_name


@pytest.mark.parametrize("streamed", [False, True])
def test_the_report_is_in_the_traced_runs_metadata(model: ChatAgentCache, streamed: bool) -> None:
    collector = RunCollectorCallbackHandler()
    config = thread(f"traced {streamed}") | {"callbacks": [collector]}
    reply = joined(list(model.stream("Hello", config))) if streamed else model.invoke("Hello", config)
    (run,) = collector.traced_runs
    assert run.extra is not None and run.extra["metadata"]["agentcache.version"] == report(reply)["version"]
    assert run.extra["metadata"]["agentcache.policy"] == report(reply)["policy"]
