"""A checkpointer that frees KV: over real checkpointers, with a cache that was not started."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command, interrupt

from agentcache import AsyncAgentCache
from agentcache.integrations.langgraph import FreeOnDelete
from agentcache.integrations.routing import Router
from tests.integrations.routed import RoutedModel, tool_calls

THREAD: Any = {"configurable": {"thread_id": "t1"}}


@tool
def ask_human(q: str) -> str:
    """Asks a human."""
    return str(interrupt(q))


@pytest.fixture
def cache() -> AsyncAgentCache:
    return AsyncAgentCache()


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BaseCheckpointSaver[Any]]:
    with ExitStack() as stack:
        if request.param == "memory":
            yield InMemorySaver()
        else:
            yield stack.enter_context(SqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")))


def agent_on(saver: Any, cache: AsyncAgentCache, *script: Any) -> tuple[RoutedModel, Any]:
    model = RoutedModel(router=Router.of(cache), script=list(script))
    return model, create_agent(model, [ask_human], checkpointer=saver)


def test_a_deleted_thread_takes_its_episodes_along(saver: Any, cache: AsyncAgentCache) -> None:
    freeing = FreeOnDelete(saver, cache)
    _, agent = agent_on(freeing, cache, tool_calls("c1", name="ask_human"), "ok", "other")
    agent.invoke({"messages": [HumanMessage("go")]}, THREAD)
    assert agent.invoke(Command(resume="yes"), THREAD)["messages"][-1].content == "ok"
    agent.invoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": "t2"}})
    assert list(freeing.list(THREAD)) == list(saver.list(THREAD)) != []
    router = Router.of(cache)
    assert router.episodes("t1") == ("t1",)
    freeing.delete_thread("t1")
    assert router.episodes("t1") == () and router.episodes("t2") == ("t2",)
    assert list(saver.list(THREAD)) == [] and freeing.get_tuple(THREAD) is None


def test_time_travel_works_through_it(saver: Any, cache: AsyncAgentCache) -> None:
    model, agent = agent_on(FreeOnDelete(saver, cache), cache, "one", "two", "one again")
    for text in ("first", "second"):
        agent.invoke({"messages": [HumanMessage(text)]}, THREAD)
    states = [state for state in agent.get_state_history(THREAD) if state.next == ("model",)]
    agent.invoke(None, states[-1].config)
    assert model.calls[2].parent == model.calls[0].version


async def test_asynchronous_checkpointers_are_wrapped_alike(tmp_path: Path, cache: AsyncAgentCache) -> None:
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as saver:
        freeing = FreeOnDelete(saver, cache)
        _, agent = agent_on(freeing, cache, tool_calls("c1", name="ask_human"), "ok")
        await agent.ainvoke({"messages": [HumanMessage("go")]}, THREAD)
        assert (await agent.ainvoke(Command(resume="yes"), THREAD))["messages"][-1].content == "ok"
        assert [s async for s in freeing.alist(THREAD, limit=2)] and await freeing.aget_tuple(THREAD) is not None
        await freeing.adelete_thread("t1")
        assert Router.of(cache).episodes("t1") == () and await saver.aget_tuple(THREAD) is None


class Pruning(InMemorySaver):
    """A checkpointer that prunes, as the stock ones in memory and SQLite do not."""

    def prune(self, thread_ids: Any, *, strategy: str = "keep_latest") -> None:
        for thread in thread_ids if strategy == "delete" else ():
            self.delete_thread(thread)

    async def aprune(self, thread_ids: Any, *, strategy: str = "keep_latest") -> None:
        self.prune(thread_ids, strategy=strategy)


async def test_pruning_frees_what_it_deletes_and_nothing_else(cache: AsyncAgentCache) -> None:
    freeing, router = FreeOnDelete(Pruning(), cache), Router.of(cache)
    _, agent = agent_on(freeing, cache)
    for thread in ("t1", "t2", "t3"):
        agent.invoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": thread}})
    freeing.prune(["t1", "t2"])
    assert router.episodes("t1") == ("t1",)
    freeing.prune(["t1"], strategy="delete")
    await freeing.aprune(["t2"], strategy="delete")
    assert [router.episodes(thread) for thread in ("t1", "t2", "t3")] == [(), (), ("t3",)]


@pytest.mark.parametrize("how", ["delete_thread", "prune"])
def test_a_deletion_that_fails_frees_nothing(cache: AsyncAgentCache, how: str) -> None:
    class Broken(InMemorySaver):
        def delete_thread(self, thread_id: str) -> None:
            raise OSError("the disk is full")

    freeing = FreeOnDelete(Broken(), cache)
    _, agent = agent_on(freeing, cache)
    agent.invoke({"messages": [HumanMessage("go")]}, THREAD)
    call: Callable[[], Any] = {
        "delete_thread": lambda: freeing.delete_thread("t1"),
        "prune": lambda: freeing.prune(["t1"], strategy="delete"),  # InMemorySaver does not prune
    }[how]
    with pytest.raises((OSError, NotImplementedError)):
        call()
    assert Router.of(cache).episodes("t1") == ("t1",)


def test_every_public_method_of_a_checkpointer_is_passed_on() -> None:
    own_default = {"get", "aget"}  # made of get_tuple and aget_tuple
    for name, member in inspect.getmembers(BaseCheckpointSaver):
        if not name.startswith("_") and (callable(member) or isinstance(member, property)) and name not in own_default:
            assert name in vars(FreeOnDelete), name
