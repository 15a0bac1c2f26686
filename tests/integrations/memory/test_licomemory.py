"""LiCoMemory's results as units, and on a real engine: what two questions share is encoded once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from agentcache import AgentCache, ConfigError
from agentcache.integrations.licomemory import LiCoMemory, result_units
from agentcache.integrations.memory_units import MemoryPrompt, MemoryUnit
from tests.integrations.memory.dialogue import TURNS

RESULT: dict[str, Any] = {
    "triples": [("Ann", "adopted", "Miso"), {"subject": "Miso", "relation": "is a", "object": "cat"}, "(Bob, rides, bike)"],
    "chunks": [{"text": "I adopted a cat.", "time": "3 March"}, "Chunk 2: 19 March The plants fell."],
    "summaries": [{"session_id": 3, "time": "8 May", "summary": "Ann starts as a gardener."}],
    "formatted_prompt": "not used",
}  # fmt: skip


def test_ranks_are_left_out_of_the_text() -> None:
    assert result_units(RESULT) == [
        MemoryUnit("Session 3 (8 May): Ann starts as a gardener.", key="summary of Session 3 (8 May)"),
        MemoryUnit("3 March I adopted a cat."),
        MemoryUnit("19 March The plants fell."),
        MemoryUnit("(Ann, adopted, Miso); (Bob, rides, bike); (Miso, is a, cat)", key="triples", encoded=False),
    ]


def test_ranks_may_stand_before_the_text() -> None:
    chunks = result_units(RESULT, ranks=True)[1:3]
    assert [(unit.label, unit.text) for unit in chunks] == [
        ("Chunk 1:", "3 March I adopted a cat."),
        ("Chunk 2:", "19 March The plants fell."),
    ]


def test_the_rank_of_a_chunk_does_not_change_its_text() -> None:
    other = {"chunks": [*reversed(RESULT["chunks"])]}
    assert {unit.text for unit in result_units(other)} == {unit.text for unit in result_units(RESULT)[1:3]}


def test_objects_with_attributes_are_taken_too() -> None:
    found = result_units(
        {
            "triples": [SimpleNamespace(head="Bob", predicate="lives in", tail="Ghent")],
            "chunks": [SimpleNamespace(content="A chain.", timestamp="21 May")],
            "summaries": ["All is well."],
        }
    )
    assert [unit.text for unit in found] == ["All is well.", "21 May A chain.", "(Bob, lives in, Ghent)"]


@pytest.mark.parametrize("result", [{}, {"chunks": None, "triples": [], "summaries": ()}])
def test_nothing_found_is_no_unit(result: dict[str, Any]) -> None:
    assert result_units(result) == []


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"chunks": "text"}, "chunks of process_query's result is 'text'; it must be a list"),
        ({"chunks": [{"score": 3}]}, "a chunk without a text"),
        ({"summaries": [" "]}, "a summary without a text"),
        ({"triples": [("a", "b")]}, r"\('a', 'b'\) is no triple"),
    ],
)
def test_what_has_no_such_form_is_named(result: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        result_units(result)


# -- on an engine ------------------------------------------------------------------------------------------------------


class Processor:
    """Stands where LiCoMemory has its graph: finds the turns that share a word with the question, the best first."""

    async def process_query(self, question: str, time: str) -> Mapping[str, Any]:
        words = {word for word in question.lower().strip("?").split() if len(word) > 3}
        ranked = sorted(
            (turn for turn in TURNS if words & {*turn[2].lower().strip(".").split()}),
            key=lambda turn: -len(words & {*turn[2].lower().split()}),
        )
        chunks = [
            f"Chunk {rank}: {when} {speaker}: {text} It was written down that day, word by word, and read again later."
            for rank, (when, speaker, text) in enumerate(ranked, 1)
        ]
        return {
            "chunks": chunks,
            "triples": [(speaker, "wrote on", when) for when, speaker, _ in ranked],
            "summaries": [],
        }


REPLY: dict[str, Any] = {"max_tokens": 4, "extra": {"ignore_eos": True}}
CAT, BIKE, BOTH = "What about Miso and plants?", "Was the bike bent or welded?", "Did Miso see the welded bike?"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("prompt", "ranks"),
    [(MemoryPrompt(), False), (MemoryPrompt(question_first=True), True)],
    ids=["late", "question first, with ranks"],
)
def test_chunks_of_two_questions_serve_a_third(cache: AgentCache, prompt: MemoryPrompt, ranks: bool) -> None:
    memory = LiCoMemory(cache=cache, processor=Processor(), policy="direct_reuse", prompt=prompt, ranks=ranks)
    name = f"{prompt.question_first}-{ranks}"
    for question in (CAT, BIKE):
        memory.ask(question, episode=f"{name}-{question}", **REPLY)
    assert memory.chunks is not None
    encoded = memory.chunks.encoded
    units = asyncio.run(memory.retrieve(BOTH))
    request = memory.request(units, BOTH)
    assert memory.chunks.encoded == encoded and len(request.sources) == len(units) - 1 >= 3
    reply = memory.send(request, f"{name}-both", **REPLY)
    lengths = [len(cache.tokenizer.encode(u.text, add_special_tokens=False)) for u in request.units if u.encoded]
    assert reply.recovery is not None and reply.recovery.reason is None
    assert {*reply.recovery.sources} == {*request.sources}
    assert reply.recovery.source_tokens >= sum(lengths) - 2 * len(lengths)
    assert not reply.recovery.exact


@pytest.mark.engine
def test_the_exact_policy_answers_as_vllm_alone(cache: AgentCache) -> None:
    memory = LiCoMemory(cache=cache, processor=Processor())
    request = memory.request(asyncio.run(memory.retrieve(CAT)), CAT)
    reply = memory.send(request, "lico exact", **REPLY)
    plain = cache.generate(request.messages, salt="lico", **REPLY)
    assert reply.token_ids == plain.token_ids
    assert request.sources == [] and reply.recovery is not None and reply.recovery.exact
