"""Which episode and which parent a model call gets, in real LangGraph graphs with a model that only routes."""

from __future__ import annotations

import gc
import operator
import subprocess
import sys
import threading
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send

from agentcache.integrations.overlap import fingerprint, overlap
from agentcache.integrations.routing import CallContext, Router, current_call
from agentcache.reply import Reply
from tests.integrations.routed import RoutedModel, tool_calls

THREAD: Any = {"configurable": {"thread_id": "t1"}}


@tool
def look(q: str) -> str:
    """Looks something up."""
    return f"found {q}"


def model(*script: Any, router: Router | None = None, **fields: Any) -> RoutedModel:
    return RoutedModel(router=router or Router(), script=list(script), calls=[], **fields)


def ask(graph: Any, text: str, config: Any = THREAD) -> Any:
    return graph.invoke({"messages": [HumanMessage(text)]}, config)


def reply(version: str) -> Reply:
    return Reply("ok", [1], "stop", 10, 0, 1.0, version=version)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_each_call_of_a_thread_is_the_next_version_of_one_episode() -> None:
    m = model(tool_calls("a"), "first", "second")
    agent = create_agent(m, [look], checkpointer=InMemorySaver())
    ask(agent, "one")
    ask(agent, "two")
    assert [route.episode for route in m.calls] == ["t1"] * 3
    assert [route.parent for route in m.calls] == [None] * 3  # the head
    kept = m.calls[1].attributes
    assert kept["thread_id"] == "t1" and kept["node"] == "model" and kept["step"] == 3
    states = [s for s in agent.get_state_history(THREAD) if s.next == ("model",)]
    assert [route.attributes["checkpoint_id"] for route in reversed(m.calls)] == [
        s.config["configurable"]["checkpoint_id"] for s in states
    ]


def test_threads_have_episodes_of_their_own() -> None:
    m = model()
    agent = create_agent(m, [], checkpointer=InMemorySaver())
    for thread in ("a", "b", 7):
        ask(agent, "the same", {"configurable": {"thread_id": thread}})
    assert [route.episode for route in m.calls] == ["a", "b", "7"]


def test_nodes_with_different_prompts_go_on_from_their_own_versions() -> None:
    m = model("plan", "act", "plan again", "act again")

    def node(system: str) -> Any:
        def run(state: MessagesState) -> dict[str, Any]:
            return {"messages": [m.invoke([SystemMessage(system), *state["messages"]])]}

        return run

    graph = StateGraph(MessagesState)
    graph.add_node("planner", node("You plan, at great length and with care."))
    graph.add_node("actor", node("You act, at once and without much thought."))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "actor")
    compiled = graph.compile(checkpointer=InMemorySaver())
    ask(compiled, "go")
    ask(compiled, "go on")
    first, second, third, fourth = m.calls
    assert {route.episode for route in m.calls} == {"t1"}
    assert (first.parent, second.parent) == (None, None)
    assert third.parent == first.version and fourth.parent == second.version
    assert third.reason == "it has more text in common than the head"


# -- namespaces --------------------------------------------------------------------------------------------------------


def outer(sub: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("sub", sub)
    graph.add_edge(START, "sub")
    return graph.compile(checkpointer=InMemorySaver())


def test_a_subgraphs_history_goes_on_in_its_episode_though_its_namespace_changes() -> None:
    m = model(tool_calls("a"), "first", "second")
    graph = outer(create_agent(m, [look]))
    ask(graph, "one")
    ask(graph, "two")
    assert [route.episode for route in m.calls] == ["t1/sub"] * 3
    assert len({route.attributes["checkpoint_ns"].split("|")[0] for route in m.calls}) == 2


def test_a_subgraph_whose_history_was_rewritten_is_found_by_its_replies() -> None:
    m = model("the first answer", "second")
    graph = outer(create_agent(m, []))
    state = ask(graph, "one")
    graph.update_state(THREAD, {"messages": [RemoveMessage(id=state["messages"][0].id)]})
    ask(graph, "a new and much longer question about something else entirely")
    assert [route.episode for route in m.calls] == ["t1/sub"] * 2


def delegate(m: RoutedModel) -> Any:
    @tool
    def helper(q: str) -> str:
        """Asks a sub-agent."""
        agent = create_agent(m, [look], system_prompt="You are a helper with a long system prompt. " * 8)
        return str(agent.invoke({"messages": [HumanMessage(q)]})["messages"][-1].content)

    return helper


def test_parallel_sub_agents_of_a_thread_have_an_episode_each() -> None:
    router = Router()
    helpers = model(tool_calls("x"), tool_calls("y"), router=router, together=threading.Barrier(2))
    main = model(tool_calls("task one", "task two", name="helper"), "ok", router=router)
    agent = create_agent(main, [delegate(helpers)], checkpointer=InMemorySaver())
    ask(agent, "go")
    assert [route.episode for route in main.calls] == ["t1", "t1"]
    by_task: dict[str, set[str | None]] = {}
    for route in helpers.calls:
        by_task.setdefault(route.attributes["checkpoint_ns"].split("|")[0], set()).add(route.episode)
    assert sorted(map(sorted, by_task.values())) == [["t1/tools"], ["t1/tools~1"]]
    assert all(route.parent is None for route in main.calls)


def test_sub_agents_of_one_step_never_share_an_episode_even_one_after_the_other() -> None:
    router = Router()
    helpers = model("same", "same", router=router)
    main = model(tool_calls("task", "task", name="helper"), "ok", router=router)
    agent = create_agent(main, [delegate(helpers)], checkpointer=InMemorySaver())
    ask(agent, "go", {**THREAD, "max_concurrency": 1})
    assert [route.episode for route in helpers.calls] == ["t1/tools", "t1/tools~1"]


def test_a_sub_agent_with_another_task_next_turn_begins_an_episode() -> None:
    router = Router()
    helpers = model("seven", "eight", router=router)
    main = model(tool_calls("weigh the seventh item", name="helper"), "ok", router=router)
    main.script += [tool_calls("translate this poem", name="helper"), "ok"]
    agent = create_agent(main, [delegate(helpers)], checkpointer=InMemorySaver())
    ask(agent, "go")
    ask(agent, "go on")
    assert [route.episode for route in helpers.calls] == ["t1/tools", "t1/tools~1"]


class Fan(TypedDict):
    tasks: list[str]
    done: Annotated[list[str], operator.add]


def test_tasks_that_were_sent_at_once_have_an_episode_each() -> None:
    m = model(together=threading.Barrier(3))

    def work(state: Any) -> dict[str, Any]:
        return {"done": [m.invoke([HumanMessage(state["task"])]).content]}

    graph = StateGraph(Fan)
    graph.add_node("work", work)
    graph.add_conditional_edges(
        START, lambda state: [Send("work", {"task": task}) for task in state["tasks"]], ["work"]
    )
    graph.add_edge("work", END)
    compiled = graph.compile(checkpointer=InMemorySaver())
    tasks = [f"task number {i} of its own kind" for i in range(3)]
    compiled.invoke({"tasks": tasks, "done": []}, THREAD)
    assert sorted(str(route.episode) for route in m.calls) == ["t1", "t1~1", "t1~2"]
    first = {route.attributes["run_id"]: route.episode for route in m.calls}
    assert len(first) == 3


def test_a_sub_agent_that_is_handed_the_conversation_is_recovered_from_it() -> None:
    router = Router()
    main = model("a long answer about shelves", "ok", router=router)
    helper = model("critique", router=router)
    graph = StateGraph(MessagesState)
    graph.add_node("main", create_agent(main, []))
    graph.add_node("critic", create_agent(helper, []))
    graph.add_edge(START, "main")
    graph.add_edge("main", "critic")
    ask(graph.compile(checkpointer=InMemorySaver()), "What is on the shelves, and since when?")
    (route,) = helper.calls
    assert route.episode == "t1/critic" and route.parent == main.calls[0].version
    assert route.reason == "it has text in common with episode 't1/main'"


# -- time travel -------------------------------------------------------------------------------------------------------


def travelled() -> tuple[RoutedModel, Any, list[Any]]:
    """An agent after two turns, and the states before its three model calls."""
    m = model(tool_calls("a"), "first", "second")
    agent = create_agent(m, [look], checkpointer=InMemorySaver())
    ask(agent, "one")
    ask(agent, "two")
    states = [s for s in agent.get_state_history(THREAD) if s.next == ("model",)]
    return m, agent, list(reversed(states))


def test_a_fork_is_recovered_from_the_version_of_its_checkpoint_and_then_goes_on() -> None:
    m, agent, states = travelled()
    m.script += [tool_calls("b"), "again"]
    agent.invoke(None, states[0].config)
    before, fork, after = m.calls[:3], m.calls[3], m.calls[4]
    assert fork.parent == before[0].version and fork.reason == "the checkpoint that was resumed from"
    assert fork.attributes["resumed_from"] == states[0].config["configurable"]["checkpoint_id"]
    assert after.parent is None and after.episode == "t1"  # the fork's own version is the head now


def test_the_same_checkpoint_can_be_forked_again() -> None:
    m, agent, states = travelled()
    agent.invoke(None, states[1].config)
    agent.invoke(None, states[1].config)
    assert [route.parent for route in m.calls[3:]] == [m.calls[1].version] * 2


def test_between_two_calls_the_former_is_the_version_of_a_checkpoint() -> None:
    m, agent, _ = travelled()
    tools = next(s for s in agent.get_state_history(THREAD) if s.next == ("tools",))
    agent.invoke(None, tools.config)
    assert m.calls[3].parent == m.calls[0].version


def test_an_update_of_an_old_state_is_recovered_from_what_it_has_most_in_common_with() -> None:
    m, agent, states = travelled()
    question = states[2].values["messages"][-1]
    changed = agent.update_state(states[2].config, {"messages": [HumanMessage("two, but other", id=question.id)]})
    agent.invoke(None, changed)
    assert m.calls[3].episode == "t1" and m.calls[3].parent == m.calls[1].version


# -- without a thread --------------------------------------------------------------------------------------------------


def test_without_a_thread_each_run_is_an_episode() -> None:
    m = model(tool_calls("a"), "ok", tool_calls("b"), "ok")
    agent = create_agent(m, [look])
    ask(agent, "the same", {})
    ask(agent, "the same", {})
    one, again, two, twice = m.calls
    assert one.episode == again.episode == f"run-{one.attributes['run_id']}"
    assert two.episode == twice.episode != one.episode


def test_messages_that_are_handed_back_go_on_with_their_run() -> None:
    m = model("first", "second")
    agent = create_agent(m, [])
    state = ask(agent, "one", {})
    agent.invoke({"messages": [*state["messages"], HumanMessage("two")]})
    assert m.calls[0].episode == m.calls[1].episode


def test_a_model_alone_begins_an_episode_each_time() -> None:
    m = model()
    m.invoke("hello")
    m.invoke("hello")
    assert len({route.episode for route in m.calls}) == 2


# -- calls that are aside, and what the caller says --------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [{"lc_source": "summarization"}, {"lc_internal_call": "token"}])
def test_a_middlewares_own_call_belongs_to_no_episode(metadata: dict[str, str]) -> None:
    m = model()
    token = current_call.set(CallContext(episode="of the node around it"))
    try:
        m.invoke("summarise", {"metadata": {"thread_id": "t1", **metadata}})
    finally:
        current_call.reset(token)
    route = m.calls[0]
    assert route.episode is None and route.parent is None and "a middleware's own call" in route.reason
    assert m.router.episodes("t1") == ()


def test_what_the_caller_says_comes_first() -> None:
    m = model()
    call = CallContext({"policy": "edit_local"}, episode="theirs")
    token = current_call.set(call)
    try:
        m.invoke("one", {"metadata": {"thread_id": "t1"}})
        m.bind(episode="mine", parent="p").invoke("one", {"metadata": {"thread_id": "t1"}})
    finally:
        current_call.reset(token)
    assert [route.episode for route in m.calls] == ["theirs", "mine"] and m.calls[1].parent == "p"
    assert call.routes == m.calls and m.calls[0].options == {"policy": "edit_local"}


def test_a_call_that_failed_or_vanished_does_not_hold_its_episode() -> None:
    router = Router()
    m = model(RuntimeError("no"), "yes", router=router)
    with pytest.raises(RuntimeError):
        m.invoke("one", {"metadata": {"thread_id": "t1"}})
    m.invoke("one", {"metadata": {"thread_id": "t1"}})
    assert [route.episode for route in m.calls] == ["t1", "t1"] and "no" in m.calls[0].reason
    router.route([HumanMessage("two")], {"thread_id": "t1"}, "r")  # never ended
    gc.collect()
    assert router.route([HumanMessage("two")], {"thread_id": "t1"}, "r").episode == "t1"


def test_a_forgotten_thread_begins_anew() -> None:
    m = model()
    m.invoke("one", {"metadata": {"thread_id": "t1"}})
    assert m.router.forget("t1") == ("t1",)
    assert m.router.episodes("t1") == ()
    assert m.router.forget("of an earlier process") == ("of an earlier process",)
    m.invoke("one", {"metadata": {"thread_id": "t1"}})
    assert m.calls[1].parent is None


# -- what prompts have in common ---------------------------------------------------------------------------------------


def test_a_message_that_was_changed_in_place_is_another_one() -> None:
    router = Router()
    messages: list[Any] = [HumanMessage("my number is 4711", id="m1")]
    first = router.route(messages, {"thread_id": "t1"}, "r1")
    said = AIMessage("noted", id="a1")
    router.finished(first, reply("v1"), said)
    before = fingerprint(messages)
    messages[0].content = "my number is [REDACTED]"
    assert before.keys.tolist() != fingerprint(messages).keys.tolist()
    assert overlap(before, fingerprint(messages)).common == 0


def test_overlap_counts_the_prefix_twice_and_system_messages_apart() -> None:
    system, one, two, three = SystemMessage("s" * 84), HumanMessage("a" * 4), HumanMessage("b" * 4), HumanMessage("c")
    old, new = fingerprint([system, one, two]), fingerprint([system, three, two])
    found = overlap(old, new)
    assert (found.prefix, found.common, found.said, found.is_append) == (100, 120, 20, False)
    assert found.score == 220
    assert overlap(old, fingerprint([system, one, two, three])).is_append


# -- what it loads -----------------------------------------------------------------------------------------------------


def test_routing_loads_neither_the_engine_nor_langgraph() -> None:
    code = (
        "import sys, agentcache.integrations.routing\n"
        "heavy = {'torch', 'vllm', 'transformers', 'langgraph'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)
