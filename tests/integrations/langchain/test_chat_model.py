"""`ChatAgentCache` on a real engine: episodes, construction, what it knows of its model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.tracers._streaming import _StreamingCallbackHandler
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from agentcache import AgentCache, ConfigError
from agentcache.integrations.langchain import ChatAgentCache, chat_model
from agentcache.integrations.langchain.messages import to_chat
from tests.integrations.langchain.talk import ENDLESS, FACTS, conversation, joined, report, thread

pytestmark = pytest.mark.engine

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
