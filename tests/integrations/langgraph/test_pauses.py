"""Pauses and resume hints of agents, with a model that only routes and a cache that was not started."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.runtime import Runtime
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from agentcache import AsyncAgentCache, ConfigError, KVPaused
from agentcache.integrations.langgraph import AgentCacheCallbackHandler, AgentCacheMiddleware, wrap_node
from agentcache.integrations.langgraph.pauses import ToolPauses
from agentcache.integrations.routing import Router
from tests.integrations.routed import RoutedModel, tool_calls

THREAD: Any = {"configurable": {"thread_id": "t1"}}


@pytest.fixture
def cache() -> AsyncAgentCache:
    return AsyncAgentCache()  # without an engine: pauses need none


@pytest.fixture
def heard(cache: AsyncAgentCache) -> Iterator[list[Any]]:
    events: list[Any] = []
    unsubscribe = cache.subscribe(events.append)
    yield events
    unsubscribe()


def model(cache: AsyncAgentCache, *script: Any) -> RoutedModel:
    return RoutedModel(router=Router.of(cache), script=list(script))


def ask(graph: Any, value: Any = None, config: Any = THREAD) -> Any:
    return graph.invoke(value or {"messages": [HumanMessage("go")]}, config)


def told(events: list[Any]) -> list[tuple[str, str | None]]:
    return [("pause" if isinstance(event, KVPaused) else "hint", event.key) for event in events]


@tool
def look(q: str) -> str:
    """Looks something up."""
    return f"found {q}"


@tool
def ask_human(q: str) -> str:
    """Asks a human."""
    return str(interrupt(q))


# -- create_agent ------------------------------------------------------------------------------------------------------


def test_a_tool_call_pauses_its_episode_and_the_only_tool_brings_the_hint(
    cache: AsyncAgentCache, heard: list[Any]
) -> None:
    during: list[Any] = []

    @tool
    def watch(q: str) -> str:
        """Watches."""
        during.extend(told(heard))
        return q

    agent = create_agent(
        model(cache, tool_calls("c1", name="watch"), "ok"), [watch], middleware=[AgentCacheMiddleware()]
    )
    ask(agent)
    assert during == [("pause", "c1"), ("hint", "c1")] == told(heard)
    assert heard[0].reason == "tool watch" and heard[0].episode == heard[1].episode


def test_of_parallel_tools_the_last_that_runs_brings_the_hint_in_whatever_order_they_end(
    cache: AsyncAgentCache, heard: list[Any]
) -> None:
    others = threading.Semaphore(0)
    while_last: list[Any] = []

    @tool
    def work(q: str) -> str:
        """Works."""
        if q == "b":
            assert others.acquire(timeout=10) and others.acquire(timeout=10)
            until = threading.Event()
            for _ in range(200):  # the others' ends are noted just after they return
                if told(heard)[-1] == ("hint", "b") or until.wait(0.02):
                    break
            while_last.extend(told(heard))
        else:
            others.release()
        return q

    calls = tool_calls("a", "b", "c", name="work")
    agent = create_agent(model(cache, calls, "ok"), [work], middleware=[AgentCacheMiddleware()])
    ask(agent)
    assert while_last == [("pause", "a"), ("pause", "b"), ("pause", "c"), ("hint", "b")]
    assert told(heard) == while_last


async def test_asynchronous_agents_pause_alike(cache: AsyncAgentCache, heard: list[Any]) -> None:
    @tool
    async def work(q: str) -> str:
        """Works."""
        await asyncio.sleep(0.05 if q == "a" else 0)
        return q

    calls = tool_calls("a", "b", name="work")
    agent = create_agent(model(cache, calls, "ok"), [work], middleware=[AgentCacheMiddleware()])
    await agent.ainvoke({"messages": [HumanMessage("go")]})
    assert told(heard) == [("pause", "a"), ("pause", "b"), ("hint", "a")]


def test_a_tool_that_fails_has_ended(cache: AsyncAgentCache, heard: list[Any]) -> None:
    @tool
    def fail(q: str) -> str:
        """Fails."""
        raise RuntimeError(q)

    agent = create_agent(model(cache, tool_calls("c1", name="fail")), [fail], middleware=[AgentCacheMiddleware()])
    with pytest.raises(RuntimeError, match="c1"):
        ask(agent)
    middleware = AgentCacheMiddleware()
    assert told(heard) == [("pause", "c1"), ("hint", "c1")] and not middleware._pauses._replies


def test_a_tool_that_asks_a_human_pauses_again_and_its_node_may_run_twice(
    cache: AsyncAgentCache, heard: list[Any]
) -> None:
    middleware = AgentCacheMiddleware()
    m = model(cache, tool_calls("c1", name="ask_human"), "ok")
    agent = create_agent(m, [ask_human], middleware=[middleware], checkpointer=InMemorySaver())
    ask(agent)
    # The hint said that it goes on; the interrupt says that it does not.
    assert told(heard) == [("pause", "c1"), ("hint", "c1"), ("pause", "c1")]
    assert heard[2].reason == "interrupt" and {event.episode for event in heard} == {"t1"}
    ask(agent, Command(resume="yes"))
    assert told(heard)[3:] == [("hint", "c1")]
    assert not middleware._pauses._replies


def test_two_tools_that_ask_wait_under_their_own_keys_until_both_have_answers(
    cache: AsyncAgentCache, heard: list[Any]
) -> None:
    m = model(cache, tool_calls("c1", "c2", name="ask_human"), "ok")
    agent = create_agent(m, [ask_human], middleware=[AgentCacheMiddleware()], checkpointer=InMemorySaver())
    state = ask(agent)
    assert sorted(told(heard)) == [("pause", "c1"), ("pause", "c2")]  # each key once, though each tool stopped
    ids = {i.value: i.id for i in state["__interrupt__"]}
    ask(agent, Command(resume={ids["c2"]: "two"}))
    assert cache._session.bus.is_paused("t1", "c1")
    ask(agent, Command(resume={ids["c1"]: "one"}))
    assert told(heard)[-1] == ("hint", "c1") and not cache._session.bus.is_paused("t1", "c1")


def test_a_structured_response_runs_no_tool_and_pauses_nothing(cache: AsyncAgentCache, heard: list[Any]) -> None:
    class Answer(BaseModel):
        """The answer."""

        q: str

    m = model(cache, tool_calls("c1", name="Answer"))
    agent = create_agent(m, [], middleware=[AgentCacheMiddleware()], response_format=ToolStrategy(Answer))
    assert ask(agent)["structured_response"] == Answer(q="c1")
    assert heard == []


def test_without_a_cache_that_it_knows_a_tool_just_runs(cache: AsyncAgentCache, heard: list[Any]) -> None:
    first = model(cache, tool_calls("c1"))
    saver = InMemorySaver()
    agent = create_agent(
        first, [look], middleware=[AgentCacheMiddleware()], checkpointer=saver, interrupt_before=["tools"]
    )
    ask(agent)
    del heard[:]
    # Another process: the tool runs before any model is called.
    for middleware, hints in ((AgentCacheMiddleware(), []), (AgentCacheMiddleware(cache=cache), [("hint", "c1")])):
        again = create_agent(
            model(cache), [look], middleware=[middleware], checkpointer=saver, interrupt_after=["tools"]
        )
        states = [s for s in again.get_state_history(THREAD) if s.next == ("tools",)]
        again.invoke(None, states[-1].config)
        assert told(heard) == hints


# -- interrupts --------------------------------------------------------------------------------------------------------


def test_an_interrupt_pauses_what_waits_and_a_resume_hints(cache: AsyncAgentCache, heard: list[Any]) -> None:
    handler = AgentCacheCallbackHandler(cache)
    m = model(cache, tool_calls("c1"), "ok")
    middleware = [HumanInTheLoopMiddleware({"look": True}), AgentCacheMiddleware()]
    agent = create_agent(m, [look], middleware=middleware, checkpointer=InMemorySaver())
    config = {**THREAD, "callbacks": [handler]}
    state = ask(agent, None, config)
    key = state["__interrupt__"][0].id
    assert told(heard) == [("pause", "c1"), ("pause", key)] and heard[1].reason == "interrupt"
    ask(agent, Command(resume={"decisions": [{"type": "approve"}]}), config)
    assert told(heard)[2:] == [("hint", None), ("hint", "c1")]
    assert {event.episode for event in heard} == {"t1"} and not handler._threads


def test_of_two_calls_one_of_which_a_human_rejects_the_other_brings_the_hint(
    cache: AsyncAgentCache, heard: list[Any]
) -> None:
    agentcache = AgentCacheMiddleware()
    middleware = [HumanInTheLoopMiddleware({"look": True}), agentcache]
    agent = create_agent(
        model(cache, tool_calls("a", "b"), "ok"), [look], middleware=middleware, checkpointer=InMemorySaver()
    )
    ask(agent)
    ask(agent, Command(resume={"decisions": [{"type": "reject"}, {"type": "approve"}]}))
    assert told(heard) == [("pause", "a"), ("pause", "b"), ("hint", "b")]
    assert not agentcache._pauses._replies


async def test_interrupts_of_asynchronous_runs_are_heard_too(cache: AsyncAgentCache, heard: list[Any]) -> None:
    m = model(cache, tool_calls("c1"), "ok")
    middleware = [HumanInTheLoopMiddleware({"look": True})]
    agent = create_agent(m, [look], middleware=middleware, checkpointer=InMemorySaver())
    config = {**THREAD, "callbacks": [AgentCacheCallbackHandler(cache)]}
    state = await agent.ainvoke({"messages": [HumanMessage("go")]}, config)
    assert told(heard) == [("pause", state["__interrupt__"][0].id)]


def test_an_interrupt_in_a_subgraph_pauses_the_subgraphs_episode(cache: AsyncAgentCache, heard: list[Any]) -> None:
    sub = create_agent(model(cache, tool_calls("c1", name="ask_human"), "ok"), [ask_human])
    graph = StateGraph(MessagesState)
    graph.add_node("sub", sub)
    graph.add_edge(START, "sub")
    compiled = graph.compile(checkpointer=InMemorySaver())
    config = {**THREAD, "callbacks": [AgentCacheCallbackHandler(cache)]}
    ask(compiled, None, config)
    ask(compiled, Command(resume="yes"), config)
    assert {event.episode for event in heard} == {"t1/sub"}
    assert [kind for kind, _ in told(heard)] == ["pause", "hint", "hint"]  # the graph and its subgraph both resume


def test_a_graph_without_a_thread_has_nothing_to_pause(cache: AsyncAgentCache, heard: list[Any]) -> None:
    ask(create_agent(model(cache), []), None, {"callbacks": [AgentCacheCallbackHandler(cache)]})
    assert heard == []


# -- wrap_node ---------------------------------------------------------------------------------------------------------


def nodes(cache: AsyncAgentCache, node: Any, tools: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node(node)
    graph.add_node("tools", tools)
    graph.add_edge(START, "research")
    graph.add_conditional_edges(
        "research", lambda state: "tools" if state["messages"][-1].tool_calls else "__end__", ["tools", "__end__"]
    )
    graph.add_edge("tools", "research")
    return graph.compile(checkpointer=InMemorySaver())


def test_a_wrapped_node_keeps_its_name_and_what_langgraph_injects(cache: AsyncAgentCache, heard: list[Any]) -> None:
    m = model(cache, tool_calls("c1"), "ok")
    seen: list[Any] = []

    def research(state: MessagesState, config: RunnableConfig, runtime: Runtime[Any]) -> dict[str, Any]:
        seen.append((config["configurable"]["thread_id"], runtime.execution_info.thread_id))
        return {"messages": [m.invoke(state["messages"])]}

    middleware = AgentCacheMiddleware(cache=cache)
    tools = ToolNode([look], wrap_tool_call=middleware.wrap_tool_call)
    graph = nodes(cache, wrap_node(research, policy="edit_local", policy_options={"k": 8}), tools)
    ask(graph)
    assert seen == [("t1", "t1")] * 2
    assert [route.options for route in m.calls] == [{"policy": "edit_local", "policy_options": {"k": 8}}] * 2
    assert told(heard) == [("pause", "c1"), ("hint", "c1")]


async def test_an_asynchronous_node_is_wrapped_alike(cache: AsyncAgentCache, heard: list[Any]) -> None:
    m = model(cache, tool_calls("c1"), "ok")

    async def research(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [await m.ainvoke(state["messages"], config)]}

    graph = nodes(cache, wrap_node(research, episode="mine"), ToolNode([look]))
    await graph.ainvoke({"messages": [HumanMessage("go")]}, THREAD)
    assert [route.episode for route in m.calls] == ["mine"] * 2
    assert told(heard) == [("pause", "c1")] and heard[0].episode == "mine"


def test_an_object_as_a_node_is_named_after_its_class(cache: AsyncAgentCache) -> None:
    class Research:
        def __call__(self, state: MessagesState) -> dict[str, Any]:
            return {"messages": [model(cache, "ok").invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node(wrap_node(Research())).add_edge(START, "Research").compile()
    assert ask(graph, None, {})["messages"][-1].content == "ok"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"polcy": "x"}, "unknown option polcy='x'; there are policy"),
        ({"max_tokens": 3}, "unknown option max_tokens=3"),
        ({"timeout": -1}, "timeout=-1"),
    ],
)
def test_a_wrong_option_is_known_before_the_graph_runs(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        wrap_node(lambda state: state, **options)
    with pytest.raises(ConfigError, match=reason):
        AgentCacheMiddleware(**options)


def test_what_is_no_function_cannot_be_wrapped() -> None:
    with pytest.raises(ConfigError, match="wrap_node takes a function, got int"):
        wrap_node(3)  # type: ignore[type-var]


# -- other models ------------------------------------------------------------------------------------------------------


def other(behaviour: Any) -> Any:
    middleware = AgentCacheMiddleware(unsupported_model_behavior=behaviour)
    return create_agent(FakeListChatModel(responses=["hi"]), [], middleware=[middleware])


def test_a_model_of_another_kind_is_left_alone_with_a_warning_or_refused() -> None:
    with pytest.warns(UserWarning, match="only does something for ChatAgentCache, not for FakeListChatModel"):
        assert ask(other("warn"), None, {})["messages"][-1].content == "hi"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask(other("ignore"), None, {})["messages"][-1].content == "hi"
    with pytest.raises(ConfigError, match="FakeListChatModel"):
        ask(other("raise"), None, {})
    with pytest.raises(ConfigError, match="unsupported_model_behavior='shout'"):
        AgentCacheMiddleware(unsupported_model_behavior="shout")  # type: ignore[arg-type]


def test_a_bound_model_is_a_supported_one(cache: AsyncAgentCache) -> None:
    middleware = AgentCacheMiddleware(unsupported_model_behavior="raise")
    assert middleware._supports(model(cache).bind(stop=["x"]).with_config(tags=["y"]))


def test_tools_that_run_one_step_after_the_other_end_in_one_place(cache: AsyncAgentCache, heard: list[Any]) -> None:
    reply = tool_calls("a", "b")
    reply.response_metadata["agentcache"] = {"episode": "e"}
    pauses, messages = ToolPauses(), [HumanMessage("go"), reply]
    for call in reply.tool_calls:
        with pauses.running(cache, call, messages):
            assert told(heard) == ([("hint", "b")] if call["id"] == "b" else [])
        messages = [*messages, ToolMessage("found", tool_call_id=call["id"])]
    assert not pauses._replies
    # Another process runs the second.
    del heard[:], messages[-1]
    with ToolPauses().running(cache, reply.tool_calls[1], messages):
        assert told(heard) == [("hint", "b")]


def test_a_tool_call_of_another_models_reply_is_not_followed(cache: AsyncAgentCache, heard: list[Any]) -> None:
    reply = tool_calls("c1")
    for state in ({"messages": [reply]}, [reply], {"messages": []}, {"other": 1}, BaseTool):
        with ToolPauses().running(cache, reply.tool_calls[0], state):
            pass
    assert heard == []
