"""Memory units without an engine: their order, their place in the prompt, and which chunks are made and dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.config import CacheConfig
from agentcache.engine.wire import MOST_SOURCES
from agentcache.errors import ConfigError
from agentcache.integrations.amem import AMemMemory
from agentcache.integrations.licomemory import LiCoMemory
from agentcache.integrations.memory_units import MemoryPrompt, MemoryUnit, UnitChunks, UnitMemory, UnitOrder


def long(text: str) -> str:
    """Returns a text that is long enough for a chunk."""
    return f"{text} " + "word " * 30


class FakeCache:
    """Counts what is encoded and dropped; a token is a word."""

    def __init__(self, **settings: Any) -> None:
        self.config = CacheConfig.build(**settings)
        self.tokenizer = SimpleNamespace(encode=lambda text, **_: text.split())
        self.here: dict[str, str] = {}
        self.encodings: list[str] = []
        self.drops: list[str] = []
        self.sent: list[dict[str, Any]] = []

    def encode_chunk(self, text: str, context: str | None = None) -> str:
        if text not in self.here:
            self.encodings.append(text)
            self.here[text] = f"chunk-{len(self.encodings)}"
        return self.here[text]

    def drop_chunk(self, chunk: str) -> None:
        self.drops.append(chunk)
        self.here = {text: name for text, name in self.here.items() if name != chunk}

    def episode(self, name: str) -> Any:
        return SimpleNamespace(generate=lambda _, **options: self.sent.append({"episode": name, **options}))


class AsyncFakeCache(FakeCache):
    async def encode_chunk(self, text: str, context: str | None = None) -> str:  # type: ignore[override]
        return FakeCache.encode_chunk(self, text, context)

    async def drop_chunk(self, chunk: str) -> None:  # type: ignore[override]
        FakeCache.drop_chunk(self, chunk)

    def episode(self, name: str) -> Any:
        async def generate(messages: Any, **options: Any) -> None:
            self.sent.append({"episode": name, "messages": messages, **options})

        return SimpleNamespace(generate=generate)


def units(*texts: str) -> list[MemoryUnit]:
    return [MemoryUnit(long(text), key=text) for text in texts]


# -- order and prompt --------------------------------------------------------------------------------------------------


def test_units_stand_in_the_order_in_which_they_were_first_seen() -> None:
    order = UnitOrder()
    assert [unit.key for unit in order.arrange(units("a", "b", "c"))] == ["a", "b", "c"]
    assert [unit.key for unit in order.arrange(units("d", "c", "a"))] == ["a", "c", "d"]


def test_a_revised_unit_keeps_its_place() -> None:
    order = UnitOrder()
    order.arrange(units("a", "b"))
    revised = MemoryUnit("another text of a", key="a")
    assert order.arrange([*units("b"), revised])[0] == revised


def test_a_text_stands_once_and_what_has_no_chunk_comes_last() -> None:
    triples = MemoryUnit("(a, b, c)", encoded=False)
    arranged = UnitOrder().arrange([triples, *units("a", "a")])
    assert arranged == (*units("a"), triples)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=6), max_size=6))
def test_two_prompts_never_exchange_two_units(queries: list[list[str]]) -> None:
    order = UnitOrder()
    arranged = [[unit.key for unit in order.arrange(units(*query))] for query in queries]
    for first in arranged:
        for second in arranged:
            both = [key for key in first if key in second]
            assert both == [key for key in second if key in first]


def test_texts_of_one_key_never_exchange_their_places() -> None:
    order = UnitOrder()
    first, second = (MemoryUnit(text, key="a") for text in ("one", "two"))
    assert order.arrange([second, *units("b"), first]) == order.arrange([first, *units("b"), second])


def test_memory_comes_after_earlier_turns_and_before_the_question() -> None:
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    messages = MemoryPrompt(system="Be brief.").render(units("a"), "Who?", history)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[-1]["content"] == f"Memories that may help:\n\n{long('a')}\n\nWho?"


def test_the_question_may_come_first_and_labels_stand_outside_of_the_text() -> None:
    prompt = MemoryPrompt(instruction="", question_first=True)
    (message,) = prompt.render([MemoryUnit("text", label="Chunk 1:")], "Who?")
    assert message["content"] == "Who?\n\nChunk 1:\n\ntext"


def test_a_question_without_memory_is_the_question() -> None:
    assert MemoryPrompt().render([], "Who?") == [{"role": "user", "content": "Who?"}]


# -- chunks ------------------------------------------------------------------------------------------------------------


def test_a_text_is_encoded_once() -> None:
    cache = FakeCache()
    chunks = UnitChunks(cache)  # type: ignore[arg-type]
    first = chunks.take(units("a", "b"))
    assert chunks.take(units("b", "c", "a")) == [first[1], "chunk-3", first[0]]
    assert cache.encodings == [long("a"), long("b"), long("c")]
    assert (chunks.encoded, chunks.reused, chunks.dropped) == (3, 2, 0)


def test_a_revised_unit_gets_one_new_chunk_and_loses_the_old_one() -> None:
    cache = FakeCache()
    chunks = UnitChunks(cache)  # type: ignore[arg-type]
    chunks.take(units("a", "b", "c"))
    chunks.take([*units("a"), MemoryUnit(long("b, evolved"), key="b"), *units("c")])
    assert cache.encodings[3:] == [long("b, evolved")]
    assert cache.drops == ["chunk-2"] and len(chunks) == 3


def test_units_of_one_key_that_come_together_keep_their_chunks() -> None:
    cache = FakeCache()
    chunks = UnitChunks(cache)  # type: ignore[arg-type]
    first, second = (MemoryUnit(long(text), key="a") for text in ("one", "two"))
    ids = chunks.take([first, second])
    for alone in ([*units("b")], [first], [second], [*units("b"), first]):
        chunks.take(alone)
    assert chunks.take([second, first]) == ids[::-1]
    assert cache.drops == [] and cache.encodings == [first.text, second.text, long("b")]


def test_a_text_that_two_units_share_stays_until_both_have_another() -> None:
    cache = FakeCache()
    chunks = UnitChunks(cache)  # type: ignore[arg-type]
    chunks.take([MemoryUnit(long("same"), key="a"), MemoryUnit(long("same"), key="b")])
    chunks.take([MemoryUnit(long("new"), key="a")])
    assert cache.drops == []
    chunks.take([MemoryUnit(long("new"), key="b")])
    assert cache.drops == ["chunk-1"]


def test_the_least_recently_used_chunks_are_dropped_beyond_the_bound() -> None:
    cache = FakeCache()
    chunks = UnitChunks(cache, most=MOST_SOURCES)  # type: ignore[arg-type]
    for at in range(MOST_SOURCES):
        chunks.take(units(f"u{at}"))
    chunks.take(units("u0"))
    chunks.take(units("x", "y"))
    assert cache.drops == ["chunk-2", "chunk-3"] and len(chunks) == MOST_SOURCES
    chunks.take(units("u1"))
    assert cache.encodings[-1] == long("u1") and cache.drops[-1] == "chunk-4"


def test_short_units_and_those_that_want_none_get_no_chunk() -> None:
    cache = FakeCache()
    taken = UnitChunks(cache).take(  # type: ignore[arg-type]
        [MemoryUnit("too short"), MemoryUnit(long("triples"), encoded=False)]
    )
    assert taken == [] and cache.encodings == []


def test_a_prompt_names_no_more_chunks_than_a_request_may() -> None:
    cache = FakeCache()
    many = [MemoryUnit(long("word " * at)) for at in range(MOST_SOURCES + 3)]
    assert len(UnitChunks(cache).take(many)) == MOST_SOURCES  # type: ignore[arg-type]
    assert cache.encodings == [unit.text for unit in many[3:]]


def test_too_small_a_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"one prompt may need {MOST_SOURCES}"):
        UnitChunks(FakeCache(), most=3)  # type: ignore[arg-type]


async def test_an_asynchronous_cache_is_awaited() -> None:
    cache = AsyncFakeCache()
    chunks = UnitChunks(cache)  # type: ignore[arg-type]
    await chunks.atake(units("a", "b"))
    await chunks.atake([MemoryUnit(long("new"), key="a")])
    assert cache.encodings == [long("a"), long("b"), long("new")] and cache.drops == ["chunk-1"]
    with pytest.raises(ConfigError, match="use atake"):
        chunks.take(units("a"))


async def test_a_synchronous_cache_is_not_awaited() -> None:
    with pytest.raises(ConfigError, match="use take"):
        await UnitChunks(FakeCache()).atake(units("a"))  # type: ignore[arg-type]


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_request_carries_its_chunks_and_its_policy() -> None:
    cache = FakeCache()
    memory = UnitMemory(cache, policy="epic", policy_options={"k": 8})  # type: ignore[arg-type]
    request = memory.request(units("a"), "Who?")
    memory.send(request, "chat", max_tokens=3)
    assert request.sources == ["chunk-1"] and request.units == (*units("a"),)
    assert cache.sent == [
        {
            "episode": "chat",
            "sources": ["chunk-1"],
            "policy": "epic",
            "policy_options": {"k": 8},
            "max_tokens": 3,
        }
    ]


@pytest.mark.parametrize("settings", [{}, {"policy": "prefix_cache"}])
def test_an_exact_policy_encodes_nothing(settings: dict[str, Any]) -> None:
    cache = FakeCache()
    memory = UnitMemory(cache, **settings)  # type: ignore[arg-type]
    assert memory.request(units("a"), "Who?").sources == [] and cache.encodings == []


def test_the_caches_policy_counts_where_none_is_given() -> None:
    memory = UnitMemory(FakeCache(policy="direct_reuse"))  # type: ignore[arg-type]
    assert memory.request(units("a"), "Who?").sources == ["chunk-1"]


async def test_the_wrong_kind_of_call_is_refused() -> None:
    request = UnitMemory(FakeCache()).request(units("a"), "Who?")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="use asend"):
        UnitMemory(AsyncFakeCache()).send(request, "chat")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="use send"):
        await UnitMemory(FakeCache()).asend(request, "chat")  # type: ignore[arg-type]


# -- adapters on an asynchronous cache ---------------------------------------------------------------------------------


async def test_amem_answers_on_an_asynchronous_cache() -> None:
    raw = "".join(f"talk start time:{at}\tmemory content: {long('Ann')}\tmemory context: c\n" for at in range(3))
    system = SimpleNamespace(find_related_memories_raw=lambda query, k: raw if (query, k) == ("Who?", 10) else "")
    cache = AsyncFakeCache(policy="direct_reuse")
    await AMemMemory(cache=cache, system=system).aask("Who?", episode="chat", max_tokens=3)  # type: ignore[arg-type]
    (sent,) = cache.sent
    assert sent["sources"] == ["chunk-1", "chunk-2", "chunk-3"] and sent["max_tokens"] == 3
    assert sent["messages"][-1]["content"].endswith("\n\nWho?")


async def test_licomemory_answers_on_an_asynchronous_cache() -> None:
    async def process_query(question: str, time: str) -> dict[str, Any]:
        return {"chunks": [f"Chunk 1: {time} {long(question)}"], "triples": [("a", "b", "c")]}

    cache = AsyncFakeCache(policy="direct_reuse")
    memory = LiCoMemory(cache=cache, processor=SimpleNamespace(process_query=process_query))  # type: ignore[arg-type]
    await memory.aask("Who?", time="May", episode="chat")
    (sent,) = cache.sent
    assert cache.encodings == [f"May {long('Who?')}".strip()] and sent["sources"] == ["chunk-1"]
    assert "(a, b, c)\n\nWho?" in sent["messages"][-1]["content"]
