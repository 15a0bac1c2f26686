"""The stock middlewares on a real engine: what kind of revision each makes, what is reused of it, and that exact is exact.

Each scenario runs twice: with an approximate policy in memory, whose tokens P, X, R and F are checked, and with the exact policy on
SQLite, whose last reply must be that of a plain request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepagents.backends import FilesystemBackend
from deepagents.middleware.summarization import SummarizationMiddleware as DeepAgentsSummarization
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    HumanInTheLoopMiddleware,
    LLMToolSelectorMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    before_model,
    wrap_model_call,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import HumanMessage, RemoveMessage, trim_messages
from langchain_core.tools import tool
from langgraph.types import Command
from pydantic import BaseModel

from agentcache import AgentCache, KVPaused, KVResumed, RevisionKind
from agentcache.integrations.langgraph import AgentCacheCallbackHandler, AgentCacheMiddleware
from tests.integrations.langgraph.scripted import Call, Scripted, plain

pytestmark = pytest.mark.engine

EXACT, LOSSY = "prefix_cache", "edit_local"
WINDOW = 16
Run = Callable[[Scripted, list[Any], Any], None]


@tool
def look(q: str) -> str:
    """Looks a shelf up."""
    return "\n".join(f"Shelf {q}, item {i}: {7 * i} grams, from store {i % 5}." for i in range(16))


@tool
def owner(q: str) -> str:
    """Says whose a shelf is."""
    return f"Shelf {q} is cleo@example.com's."


@tool
def note(q: str) -> str:
    """Takes a note."""
    return f"noted: {q}"


def scenario(
    engine: AgentCache, savers: Callable[[str], Any], run: Run, *script: Any, aside: Any = ()
) -> tuple[list[Call], Scripted]:
    """Runs a scenario with both policies; checks the exact one and the counts of all, and returns the calls of the other."""
    lossy = Scripted.on(engine, *script, aside=aside)
    options = {"policy": LOSSY, "policy_options": {"k": WINDOW}}
    run(lossy, [AgentCacheMiddleware(**options)], savers(LOSSY))
    exact = Scripted.on(engine, *script, aside=aside)
    run(exact, [AgentCacheMiddleware(policy=EXACT)], savers(EXACT))
    for call in (*lossy.calls, *exact.calls):
        t = call.tokens
        assert t.prefix_tokens + t.fresh_tokens + t.repair_tokens + t.reused_tokens + t.new_tokens == t.prompt_tokens
        assert t.prompt_tokens == len(call.ids) and t.lost_tokens == 0 and t.reason is None
    for call in exact.calls:
        assert call.tokens.exact and call.tokens.reused_tokens == 0 and call.tokens.requested_policy == EXACT
    free = exact.calls[-1]
    assert len(free.reply) == 6 and plain(engine, free) == free.reply
    return lossy.calls, lossy


def check_edit(call: Call, kind: RevisionKind, *, reused: int) -> None:
    """Checks a call whose prompt has changed in the middle: all that stands behind the edit is repaired or reused."""
    t = call.tokens
    assert call.kind is kind
    assert t.requested_policy == t.policy == LOSSY
    assert t.prefix_tokens == call.shared_prefix
    assert t.suffix_tokens == t.repair_tokens + t.reused_tokens >= call.longest_shared  # and shorter passages
    assert 0 < t.repair_tokens <= 2 * WINDOW and t.reused_tokens >= reused
    assert t.fresh_tokens + t.new_tokens == t.prompt_tokens - t.prefix_tokens - t.suffix_tokens


def check_appends(calls: list[Call]) -> None:
    """Checks that calls after a first one only added to their prompts: the whole parent is P."""
    for call in calls:
        t = call.tokens
        assert call.kind is RevisionKind.APPEND
        assert t.prefix_tokens == call.shared_prefix == len(call.old_ids)
        assert (t.fresh_tokens, t.repair_tokens, t.reused_tokens) == (0, 0, 0)


def ask(agent: Any, value: Any, thread: str, **config: Any) -> Any:
    value = {"messages": [HumanMessage(value)]} if isinstance(value, str) else value
    return agent.invoke(value, {"configurable": {"thread_id": thread}, **config})


# -- middlewares that edit the middle ----------------------------------------------------------------------------------


def test_clearing_old_tool_results_is_an_edit_of_tool_results(engine: AgentCache, savers: Any) -> None:
    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        clear = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=250, keep=1)])
        agent = create_agent(model, [look], middleware=[clear, *last], checkpointer=saver, system_prompt="Be brief.")
        ask(agent, "Compare the shelves.", model.thread)

    shelves = [[("look", {"q": q})] for q in "abc"]
    calls, _ = scenario(engine, savers, run, *shelves, None)
    assert [call.kind for call in calls[:2]] == [RevisionKind.FIRST, RevisionKind.APPEND]
    # One more result is cleared each turn; the one before it and all after it are reused.
    check_edit(calls[2], RevisionKind.TOOL_RESULT, reused=5)
    check_edit(calls[3], RevisionKind.TOOL_RESULT, reused=5)
    assert [message["content"] for message in calls[3].chat if message["role"] == "tool"][:2] == ["[cleared]"] * 2


def test_summarisation_keeps_the_tail(engine: AgentCache, savers: Any) -> None:
    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        summarise = SummarizationMiddleware(model, trigger=("messages", 7), keep=("messages", 6))
        agent = create_agent(
            model, [look], middleware=[summarise, *last], checkpointer=saver, system_prompt="Be brief."
        )
        for text in ("What is on shelf a?", "And on b?"):
            ask(agent, text, model.thread)

    calls, model = scenario(
        engine, savers, run, [("look", {"q": "a"})], "Seven items of note.", [("look", {"q": "b"})], None
    )
    assert [call.kind for call in calls[:3]] == [RevisionKind.FIRST, RevisionKind.APPEND, RevisionKind.APPEND]
    check_edit(calls[3], RevisionKind.SUMMARISATION, reused=200)
    assert calls[3].chat[1]["tags"] == ["summarization"]
    # The summary itself was written aside, exactly.
    (aside,) = model.aside
    assert "lc_source=summarization" in aside.report["aside"] and aside.report["version"] is None


def test_the_summarisation_of_deepagents_changes_the_request_alone(
    engine: AgentCache, savers: Any, tmp_path: Path
) -> None:
    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        summarise = DeepAgentsSummarization(
            model, backend=FilesystemBackend(tmp_path), trigger=("messages", 7), keep=("messages", 6)
        )
        agent = create_agent(
            model, [look], middleware=[summarise, *last], checkpointer=saver, system_prompt="Be brief."
        )
        for text in ("What is on shelf a?", "And on b?"):
            state = ask(agent, text, model.thread)
        assert len(state["messages"]) == 8  # nothing left the state

    calls, model = scenario(
        engine, savers, run, [("look", {"q": "a"})], "Seven items of note.", [("look", {"q": "b"})], None
    )
    check_edit(calls[-1], RevisionKind.SUMMARISATION, reused=200)
    assert len(model.aside) == 1


@before_model
def remove_oldest(state: Any, runtime: Any) -> dict[str, Any] | None:
    old = state["messages"]
    return {"messages": [RemoveMessage(id=m.id) for m in old[:2]]} if len(old) > 4 else None


@wrap_model_call
def trim_request(request: Any, handler: Callable[[Any], Any]) -> Any:
    kept = trim_messages(
        request.messages, max_tokens=450, token_counter=request.model, strategy="last", start_on="human"
    )
    return handler(request.override(messages=kept))


@pytest.mark.parametrize("trim", [remove_oldest, trim_request], ids=["RemoveMessage", "trim_messages"])
def test_leaving_out_the_oldest_messages_is_a_truncation(engine: AgentCache, savers: Any, trim: Any) -> None:
    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        agent = create_agent(model, [look], middleware=[trim, *last], checkpointer=saver, system_prompt="Be brief.")
        ask(agent, "What do you sell, and since when? " * 4, model.thread)
        ask(agent, "What is on shelf a?", model.thread)

    calls, _ = scenario(engine, savers, run, "Shelves, mostly.", [("look", {"q": "a"})], None)
    check_edit(calls[2], RevisionKind.TRUNCATION, reused=20)
    assert "sell" not in str(calls[2].chat)


def test_personal_data_that_is_redacted_in_a_reply_is_an_edit_of_the_reply(engine: AgentCache, savers: Any) -> None:
    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        redact = PIIMiddleware("email", strategy="redact", apply_to_output=True)
        agent = create_agent(model, [], middleware=[redact, *last], checkpointer=saver)
        for text in ("Whom do I ask, and write to ann@example.com?", "And then?"):
            state = ask(agent, text, model.thread)
        texts = [str(message.content) for message in state["messages"]]
        assert not any("example.com" in text for text in texts) and "[REDACTED_EMAIL]" in texts[1]

    calls, _ = scenario(engine, savers, run, "Write to bob@example.com about it, please.", None)
    # The reply came back with other words in it: all before them is P, and nothing stands behind the reply.
    t = calls[1].tokens
    assert calls[1].kind is RevisionKind.RETOKENISATION and "bob@example.com" in calls[0].text
    assert len(calls[0].ids) < t.prefix_tokens == calls[1].shared_prefix < len(calls[1].old_ids)
    assert (t.fresh_tokens, t.repair_tokens, t.reused_tokens) == (0, 0, 0)


def test_personal_data_that_is_redacted_in_place_is_an_edit_of_the_message(engine: AgentCache, savers: Any) -> None:
    question = "I am ann@example.com. " + "Which of the items on the first shelf are light, and who counts them? " * 4

    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        def agent(*first: Any, **settings: Any) -> Any:
            return create_agent(model, [look], middleware=[*first, *last], checkpointer=saver, **settings)

        ask(agent(interrupt_before=["tools"]), question, model.thread)
        ask(agent(PIIMiddleware("email", strategy="redact")), None, model.thread)

    calls, _ = scenario(engine, savers, run, [("look", {"q": "a"})], None)
    assert "ann@example.com" in calls[0].chat[0]["content"] and "[REDACTED_EMAIL]" in calls[1].chat[0]["content"]
    check_edit(calls[1], RevisionKind.OTHER, reused=40)


def test_personal_data_that_never_reaches_the_model_is_no_edit(engine: AgentCache, savers: Any) -> None:
    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        redact = PIIMiddleware("email", strategy="redact", apply_to_input=True, apply_to_tool_results=True)
        agent = create_agent(model, [owner], middleware=[redact, *last], checkpointer=saver)
        for text in ("Whom do I ask, and write to ann@example.com?", "And then?"):
            ask(agent, text, model.thread)

    calls, _ = scenario(engine, savers, run, [("owner", {"q": "a"})], "The owner.", None)
    said = [str(message.get("content")) for call in calls for message in call.chat]
    assert not any("example.com" in text for text in said)
    assert sum("[REDACTED_EMAIL]" in str(message.get("content")) for message in calls[-1].chat) == 2
    check_appends(calls[1:])


def test_tools_that_a_selector_exchanges_change_the_system_block(engine: AgentCache, savers: Any) -> None:
    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        select = LLMToolSelectorMiddleware(max_tools=1)
        tools = [look, note]
        agent = create_agent(model, tools, middleware=[select, *last], checkpointer=saver, system_prompt="Be brief.")
        for text in ("What is on the first shelf, and how heavy is each item of it? " * 4, "Take a note."):
            ask(agent, text, model.thread)

    chosen = [[("ToolSelectionResponse", {"tools": [name]})] for name in ("look", "note")]
    calls, model = scenario(engine, savers, run, "Seven items, all of them light.", None, aside=chosen)
    assert [[tool["function"]["name"] for tool in call.options["tools"]] for call in calls] == [["look"], ["note"]]
    assert len(model.aside) == 2 and all("tool_selection" in call.report["aside"] for call in model.aside)
    check_edit(calls[1], RevisionKind.MEMORY, reused=20)


# -- middlewares that only add -----------------------------------------------------------------------------------------


def test_a_todo_list_only_adds(engine: AgentCache, savers: Any) -> None:
    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        agent = create_agent(model, [look], middleware=[TodoListMiddleware(), *last], checkpointer=saver)
        state = ask(agent, "Compare the shelves.", model.thread)
        assert state["todos"] == [{"content": "look", "status": "pending"}]

    todos = [("write_todos", {"todos": [{"content": "look", "status": "pending"}]})]
    calls, _ = scenario(engine, savers, run, todos, [("look", {"q": "a"})], None)
    check_appends(calls[1:])


class Answer(BaseModel):
    """The answer."""

    grams: int


def test_a_structured_response_is_a_forced_call_that_the_next_turn_adds_to(engine: AgentCache, savers: Any) -> None:
    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        agent = create_agent(model, [], middleware=last, checkpointer=saver, response_format=ToolStrategy(Answer))
        first = ask(agent, "How heavy is item 7?", model.thread)
        assert first["structured_response"] == Answer(grams=49)
        plain_agent = create_agent(model, [], middleware=last, checkpointer=saver)
        ask(plain_agent, "And item 8?", model.thread)

    calls, _ = scenario(engine, savers, run, [("Answer", {"grams": 49})], None)
    assert "Answer" in {t["function"]["name"] for t in calls[0].options["tools"]}
    # Without the tool the system block is another one; what was said is still there.
    check_edit(calls[1], RevisionKind.MEMORY, reused=5)


# -- humans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", ["approve", "edit"])
def test_a_human_in_the_loop_pauses_and_may_edit_the_call(engine: AgentCache, savers: Any, decision: str) -> None:
    heard: list[Any] = []
    unsubscribe = engine.subscribe(heard.append, ["kv_paused", "kv_resumed"])
    answers: dict[str, Any] = {
        "approve": {"type": "approve"},
        "edit": {"type": "edit", "edited_action": {"name": "look", "args": {"q": "the very last one"}}},
    }

    def run(model: Scripted, last: list[Any], saver: Any) -> None:
        human = HumanInTheLoopMiddleware({"look": True})
        agent = create_agent(model, [look], middleware=[human, *last], checkpointer=saver)
        handler = AgentCacheCallbackHandler(engine)
        thread = model.thread
        del heard[:]
        state = ask(agent, "What is on shelf a?", thread, callbacks=[handler])
        call_id = state["messages"][-1].tool_calls[0]["id"]
        ask(agent, Command(resume={"decisions": [answers[decision]]}), thread, callbacks=[handler])
        told = [(type(event), event.key, event.reason if isinstance(event, KVPaused) else None) for event in heard]
        version = model.calls[0].report["version"]
        assert told == [
            (KVPaused, version, "the reply ended"),
            (KVPaused, call_id, "tool look"),
            (KVPaused, state["__interrupt__"][0].id, "interrupt"),
            (KVResumed, None, None),  # the human has answered
            (KVResumed, call_id, None),  # the tool runs
            (KVResumed, None, None),  # the model goes on
            (KVPaused, model.calls[1].report["version"], "the reply ended"),
        ]
        assert {event.episode for event in heard} == {thread}

    calls, _ = scenario(engine, savers, run, [("look", {"q": "a"})], None)
    unsubscribe()
    # LangChain leaves the call as the model wrote it, and says in the tool's result what was edited.
    check_appends(calls[1:])
    assert ("the very last one" in calls[1].chat[2]["content"]) == (decision == "edit")
