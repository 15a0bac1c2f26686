"""Threads, forks, sub-agents and deleted threads on a real engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentcache import AgentCache, KVPaused, KVResumed, RevisionKind
from agentcache.integrations.langgraph import AgentCacheMiddleware, FreeOnDelete, wrap_node
from tests.integrations.langgraph.scripted import Scripted, plain

pytestmark = pytest.mark.engine


@tool
def look(q: str) -> str:
    """Looks a shelf up."""
    return "\n".join(f"Shelf {q}, item {i}: {7 * i} grams, from store {i % 5}." for i in range(16))


def ask(agent: Any, text: str, thread: str | None, **config: Any) -> Any:
    where = {"configurable": {"thread_id": thread}} if thread is not None else {}
    return agent.invoke({"messages": [HumanMessage(text)]}, {**where, **config})


# -- forks and time travel ---------------------------------------------------------------------------------------------


def test_a_fork_of_an_old_checkpoint_has_all_of_its_prompt(engine: AgentCache) -> None:
    m = Scripted.on(engine, [("look", {"q": "a"})], "First.", "Second.", None)
    agent = create_agent(m, [look], middleware=[AgentCacheMiddleware()], checkpointer=InMemorySaver())
    ask(agent, "What is on shelf a?", m.thread)
    ask(agent, "And the rest?", m.thread)
    states = [s for s in agent.get_state_history({"configurable": {"thread_id": m.thread}}) if s.next == ("model",)]
    agent.invoke(None, states[1].config)  # before the reply "First."
    _, before, head, fork = m.calls
    assert fork.kind is RevisionKind.IDENTICAL and fork.ids == before.ids
    assert fork.report["parent"] == before.report["version"] != head.report["version"]
    # vLLM computes the last token of a prompt in any case.
    assert fork.tokens.prefix_tokens >= len(fork.ids) - 1 and fork.tokens.new_tokens <= 1
    assert plain(engine, fork) == fork.reply
    history = engine.episode(m.thread).history()
    assert [record.attributes["checkpoint_id"] for record in history[:3]] == [
        s.config["configurable"]["checkpoint_id"] for s in reversed(states)
    ]
    assert history[3].attributes["resumed_from"] == states[1].config["configurable"]["checkpoint_id"]


def test_an_edit_of_an_old_state_reuses_what_stands_behind_it(engine: AgentCache) -> None:
    m = Scripted.on(engine, [("look", {"q": "a"})], "First.", None)
    last = AgentCacheMiddleware(policy="edit_local", policy_options={"k": 16})
    agent = create_agent(m, [look], middleware=[last], checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": m.thread}}
    ask(agent, "What is on shelf a?", m.thread)
    state = next(s for s in agent.get_state_history(thread) if s.next == ("model",))
    question = state.values["messages"][0]
    changed = agent.update_state(state.config, {"messages": [HumanMessage("What is on it, then?", id=question.id)]})
    agent.invoke(None, changed)
    fork = m.calls[2]
    assert fork.report["parent"] == m.calls[1].report["version"]
    assert fork.tokens.prefix_tokens == fork.shared_prefix < len(m.calls[0].ids)
    assert fork.tokens.reused_tokens > 250 and fork.tokens.repair_tokens <= 32
    assert fork.kind is RevisionKind.OTHER  # a user's words were changed


# -- sub-agents and parallel tools -------------------------------------------------------------------------------------


def test_parallel_tools_answer_in_the_order_of_their_calls_and_only_add(
    engine: AgentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = Scripted.on(engine, [("weigh", {"q": "a"}), ("weigh", {"q": "b"})], None)
    b_is_done, hinted = threading.Event(), threading.Event()
    session, hints = engine._cache._session, []

    def hint(version: str) -> None:
        hints.append(version)
        type(session).hint(session, version)
        hinted.set()

    monkeypatch.setattr(session, "hint", hint)

    @tool
    def weigh(q: str) -> str:
        """Weighs a shelf."""
        if q == "a":
            assert b_is_done.wait(10) and hinted.wait(10)  # while this one still runs
        else:
            b_is_done.set()
        return f"shelf {q}: 49 kilograms"

    heard: list[Any] = []
    unsubscribe = engine.subscribe(heard.append, ["kv_paused", "kv_resumed"])
    agent = create_agent(m, [weigh], middleware=[AgentCacheMiddleware()], checkpointer=InMemorySaver())
    state = ask(agent, "Weigh both.", m.thread)
    unsubscribe()
    a, b = (call["id"] for call in state["messages"][1].tool_calls)
    told = [(type(e), e.key) for e in heard if e.key in (a, b)]
    assert told[:2] == [(KVPaused, a), (KVPaused, b)] and told[2:] == [(KVResumed, a)]
    assert hints == [m.calls[0].report["version"]]  # the engine was told once
    call = m.calls[1]
    assert call.kind is RevisionKind.APPEND and call.tokens.prefix_tokens == len(call.old_ids)
    assert [message["content"][6] for message in call.chat if message["role"] == "tool"] == ["a", "b"]
    assert plain(engine, call) == call.reply


def test_sub_agents_that_run_at_once_have_episodes_and_kv_of_their_own(engine: AgentCache) -> None:
    workers = [Scripted.on(engine, [("look", {"q": q})], None) for q in "ab"]
    both = threading.Barrier(2)

    @tool
    def delegate(q: str) -> str:
        """Asks a sub-agent."""
        model = workers["ab".index(q)]
        agent = create_agent(model, [look], system_prompt="You help.", middleware=[AgentCacheMiddleware()])
        both.wait(10)
        return str(agent.invoke({"messages": [HumanMessage(f"What is on shelf {q}?")]})["messages"][-1].content)

    main = Scripted.on(engine, [("delegate", {"q": "a"}), ("delegate", {"q": "b"})], None)
    agent = create_agent(main, [delegate], middleware=[AgentCacheMiddleware()], checkpointer=InMemorySaver())
    ask(agent, "Ask both.", main.thread)
    assert {call.report["episode"] for call in main.calls} == {main.thread}
    theirs = [{call.report["episode"] for call in worker.calls} for worker in workers]
    assert sorted(map(sorted, theirs)) == [[f"{main.thread}/tools"], [f"{main.thread}/tools~1"]]
    for model in (main, *workers):
        assert [call.kind for call in model.calls] == [RevisionKind.FIRST, RevisionKind.APPEND]
        assert plain(engine, model.calls[1]) == model.calls[1].reply


def test_a_subgraph_goes_on_where_its_last_turn_ended(engine: AgentCache) -> None:
    m = Scripted.on(engine, [("look", {"q": "a"})], "First.", None)
    graph = StateGraph(MessagesState)
    graph.add_node("sub", create_agent(m, [look], middleware=[AgentCacheMiddleware()]))
    graph.add_edge(START, "sub")
    compiled = graph.compile(checkpointer=InMemorySaver())
    ask(compiled, "What is on shelf a?", m.thread)
    ask(compiled, "And the rest?", m.thread)
    assert {call.report["episode"] for call in m.calls} == {f"{m.thread}/sub"}
    last = m.calls[2]
    assert last.kind is RevisionKind.APPEND and last.tokens.prefix_tokens == len(last.old_ids) > 300


def test_without_a_thread_a_run_is_an_episode(engine: AgentCache) -> None:
    m = Scripted.on(engine, [("look", {"q": "a"})], None, None)
    agent = create_agent(m, [look], middleware=[AgentCacheMiddleware()])
    ask(agent, "What is on shelf a?", None)
    ask(agent, "What is on shelf a?", None)
    first, second, other = m.calls
    assert first.report["episode"] == second.report["episode"] != other.report["episode"]
    assert [call.kind for call in m.calls] == [RevisionKind.FIRST, RevisionKind.APPEND, RevisionKind.FIRST]


# -- any graph, any way to run it --------------------------------------------------------------------------------------


def test_a_wrapped_node_of_a_graph_recovers_by_its_own_policy(engine: AgentCache) -> None:
    m = Scripted.on(engine, "Noted.", None)
    documents = [look.invoke({"q": "a"}), look.invoke({"q": "b"})]

    def research(state: MessagesState) -> dict[str, Any]:
        texts = [HumanMessage(text, id=f"document {i}") for i, text in enumerate(documents)]
        return {"messages": [m.invoke([*texts, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("research", wrap_node(research, policy="edit_local", policy_options={"k": 16}))
    graph.add_edge(START, "research")
    compiled = graph.compile(checkpointer=InMemorySaver())
    ask(compiled, "What is on the shelves?", m.thread)
    documents[0] = "Shelf a was cleared this morning."
    ask(compiled, "And now?", m.thread)
    t = m.calls[1].tokens
    assert t.policy == "edit_local" and t.reused_tokens > 250 and 0 < t.repair_tokens <= 32
    assert t.prefix_tokens == m.calls[1].shared_prefix


def test_what_the_call_says_comes_before_what_the_middleware_asks_for(engine: AgentCache) -> None:
    class Careful(AgentMiddleware):
        def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
            return handler(request.override(model_settings={"policy": "prefix_cache"}))

    m = Scripted.on(engine, None, None)
    last = AgentCacheMiddleware(policy="edit_local", policy_options={"k": 16})
    for middlewares in ([Careful(), last], [last]):
        ask(create_agent(m, [], middleware=middlewares), "What is on shelf a?", None)
    assert [call.tokens.requested_policy for call in m.calls] == ["prefix_cache", "edit_local"]
    assert [call.options.get("policy_options") for call in m.calls] == [None, {"k": 16}]


async def test_asynchronous_and_streaming_agents_are_followed_alike(engine: AgentCache) -> None:
    m = Scripted.on(engine, [("look", {"q": "a"})], None)
    agent = create_agent(m, [look], middleware=[AgentCacheMiddleware()], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": m.thread}}
    chunks = [
        part async for part, _ in agent.astream({"messages": [HumanMessage("Go.")]}, config, stream_mode="messages")
    ]
    assert len(chunks) > 3
    history = engine.episode(m.thread).history()
    assert [record.kind for record in history] == [RevisionKind.FIRST, RevisionKind.APPEND]
    state = await agent.ainvoke({"messages": [HumanMessage("And?")]}, config)
    report = state["messages"][-1].response_metadata["agentcache"]
    assert report["episode"] == m.thread and report["kind"] == "append" and report["prefix_tokens"] > 300


# -- seeing it ---------------------------------------------------------------------------------------------------------


def test_the_report_of_a_call_is_in_the_trace(engine: AgentCache) -> None:
    m = Scripted.on(engine, None)
    agent = create_agent(m, [], middleware=[AgentCacheMiddleware()], checkpointer=InMemorySaver())
    exporter, collector = InMemorySpanExporter(), RunCollectorCallbackHandler()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("agent"):
        ask(agent, "What is on shelf a?", m.thread, callbacks=[collector])
    (span,) = exporter.get_finished_spans()
    call = m.calls[0]
    attributes = dict(span.attributes or {})
    assert attributes["agentcache.version"] == call.report["version"]
    assert attributes["agentcache.new_tokens"] == call.tokens.new_tokens > 0

    def runs(run: Any) -> Any:
        yield run
        for child in run.child_runs:
            yield from runs(child)

    of_model = [run for root in collector.traced_runs for run in runs(root) if run.run_type in ("llm", "chat_model")]
    metadata = (of_model[0].extra or {})["metadata"]
    assert metadata["agentcache.version"] == call.report["version"] and metadata["agentcache.episode"] == m.thread


# -- deleted threads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_deleted_threads_kv_is_freed(engine: AgentCache, kind: str, tmp_path: Path) -> None:
    def stored() -> tuple[int, int]:
        assert engine.flush()
        index = engine.stats()["ranks"][0]["index"]
        return index["versions"], index["bytes"]

    with SqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as sqlite:
        saver = FreeOnDelete(sqlite if kind == "sqlite" else InMemorySaver(), engine)
        before = stored()
        m = Scripted.on(engine, [("look", {"q": "a"})], None, None)
        agent = create_agent(m, [look], middleware=[AgentCacheMiddleware()], checkpointer=saver)
        ask(agent, "What is on shelf a?", m.thread)
        during = stored()
        assert during[0] == before[0] + 2 and during[1] > before[1]
        saver.delete_thread(m.thread)
        assert stored() == before
        assert engine.episode(m.thread).history() == []
        ask(agent, "What is on shelf a?", m.thread)
        assert m.calls[-1].kind is RevisionKind.FIRST
