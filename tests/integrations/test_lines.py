"""What episodes are called, and how many of them are kept."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from agentcache import AsyncAgentCache, ConfigError
from agentcache.engine.wire import ResumeParams
from agentcache.integrations import lines
from agentcache.integrations.lines import _episode_id, _escaped
from agentcache.integrations.routing import Route, Router
from agentcache.reply import Reply
from tests.integrations.routed import RoutedModel


def model(*script: Any, router: Router | None = None) -> RoutedModel:
    return RoutedModel(router=router or Router(), script=list(script), calls=[])


def reply(version: str) -> Reply:
    return Reply("ok", [1], "stop", 10, 0, 1.0, version=version)


def noting() -> tuple[Router, list[str]]:
    """A router of two runs, and what it drops."""
    router, dropped = Router(most_runs=2), list[str]()
    router._drop = lambda episodes: dropped.extend(episodes)  # type: ignore[method-assign, assignment]
    return router, dropped


# -- ids ---------------------------------------------------------------------------------------------------------------


def test_a_very_long_thread_id_is_still_an_episodes_id() -> None:
    ids = {_episode_id("x" * 400 + end, "", 0) for end in "ab"}
    assert len(ids) == 2 and all(len(i) <= 256 for i in ids)


def test_no_two_lines_of_threads_have_one_id_whatever_threads_and_nodes_are_called() -> None:
    names = ("t", "t/", "t~", "t~1", "t~7e;1", "t/a", "t/a~1", "t/~1", "t~2f;a", "/", "~", "~1")
    nodes = ("", *(_escaped(name) for name in ("a", "a~1", "a/b", "~1")), "a/b")
    ids = [_episode_id(name, node, number) for name in names for node in nodes for number in range(3)]
    assert len(set(ids)) == len(ids)


def test_threads_that_are_called_like_anothers_subgraph_or_second_line_are_apart() -> None:
    router = Router()
    m = model(router=router)
    m.invoke("one", {"metadata": {"thread_id": "user", "langgraph_checkpoint_ns": "sub:1|model:2"}})
    for thread in ("user/sub", "user", "user~1"):
        m.invoke("one", {"metadata": {"thread_id": thread}})
    assert router.episodes("user") == ("user/sub", "user") and router.episodes("user/sub") == ("user~2f;sub",)
    assert router.forget("user/sub") == ("user~2f;sub",) and router.forget("user~1") == ("user~7e;1",)
    assert router.episodes("user") == ("user/sub", "user")


def test_a_thread_id_that_is_no_text_is_still_an_episodes_id() -> None:
    cache = AsyncAgentCache()
    ids = [_episode_id(thread, "", 0) for thread in ("thread-\ud83d", "thread-\ud83e", "x" * 400 + "\ud83d")]
    assert ids[:2] == ["thread-~d83d;", "thread-~d83e;"]
    for name in ids:
        assert ResumeParams(version="v", episode=cache.episode(name).id).episode == name
    with pytest.raises(ConfigError, match=r"'mine-\\ud83d' holds half a character at 5"):
        cache.episode("mine-\ud83d")


def test_a_thread_without_a_name_is_none() -> None:
    m = model()
    m.invoke("one", {"metadata": {"thread_id": ""}})
    assert m.calls[0].episode == f"run-{m.calls[0].attributes['run_id']}"
    assert m.router.forget("") == () == m.router.waiting("")


# -- limits ------------------------------------------------------------------------------------------------------------


def test_old_runs_are_dropped() -> None:
    router, dropped = noting()
    m = model(router=router)
    for i in range(4):
        m.invoke(f"hello {i}")
    assert dropped == [route.episode for route in m.calls[:2]]


def test_a_run_whose_call_is_open_is_not_dropped() -> None:
    router, dropped = noting()
    routes = [router.route([HumanMessage("go")], {}, str(i)) for i in range(40)]
    assert dropped == [] and len({route.episode for route in routes}) == 40
    for i, route in enumerate(routes):
        router.finished(route, reply(f"v{i}"), AIMessage("ok", id=f"a{i}"))
    # They go on where they were, and the next ones bring their number down again.
    assert router.route([AIMessage("ok", id="a0"), HumanMessage("two")], {}, "later").episode == routes[0].episode
    for i in range(40, 45):
        router.failed(router.route([HumanMessage("go")], {}, str(i)))
    assert len(router._lines._runs) == 2 and len(dropped) == len(set(dropped)) == 43


def test_of_a_subgraphs_lines_one_whose_call_is_open_is_not_dropped() -> None:
    router, dropped = noting()

    def sent(i: int) -> Route:
        return router.route(
            [HumanMessage("go")], {"thread_id": "t", "langgraph_checkpoint_ns": f"sub:{i}|node:{i}"}, ""
        )

    routes = [sent(i) for i in range(4)]
    assert dropped == [] and [route.episode for route in routes] == ["t/sub", "t/sub~1", "t/sub~2", "t/sub~3"]
    for route in routes:
        router.failed(route)
    assert sent(4).episode == "t/sub~4" and dropped == ["t/sub", "t/sub~1", "t/sub~2"]


def test_a_thread_that_was_long_unused_goes_on_with_its_episodes_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MOST_THREADS", 2)
    m = model()
    for thread in ("a", "b", "c", "a"):
        m.invoke("one", {"metadata": {"thread_id": thread}})
    assert m.router.episodes("b") == () and m.calls[3].episode == "a" and m.calls[3].parent is None


def test_only_the_newest_versions_are_kept_for_comparison() -> None:
    router = Router()
    messages: list[Any] = [SystemMessage("You are careful. " * 100)]
    for i in range(100):
        messages += [HumanMessage(f"{i} " + "question " * 70), AIMessage(f"{i} " + "answer " * 90, id=f"a{i}")]
    for turn in range(20):
        prompt = [*messages[: 1 + turn], HumanMessage(f"cleared {turn}"), *messages[2 + turn :]]
        route = router.route(prompt, {"thread_id": "t"}, str(turn))
        router.finished(route, reply(f"v{turn}"), AIMessage("ok"))
    compared = router._lines._threads["t"][""].lines[0]
    assert sum(v.prompt is not None for v in compared._versions) == lines._LOOKED_BACK
