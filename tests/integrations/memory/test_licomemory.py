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
    "triples": [
        {"src": "Miso", "relation": "is a", "tgt": "cat", "triple_text": "Miso is a cat", "chunk_id": "7", "timestamp": "2023/03/03"},
        {"src": "Ann", "relation": "adopted", "tgt": "Miso", "triple_text": "Ann adopted Miso", "final_score": 0.7},
    ],
    "chunks": ["2023/03/03 Ann: I adopted a cat.", "2023/03/19 Ann: The plants fell."],
    "summaries": [
        {
            "session_id": "3", "session_time": "2023/05/08", "keys": "May 8th, garden, Miso",
            "context": {
                "theme_1": "Work", "summary_1": "Ann starts as a gardener.",
                "theme_2": "Pets", "summary_2": "Miso sleeps in a flower pot.",
            },
        }
    ],
    "formatted_prompt": "not used",
}  # fmt: skip
"""The form of LiCoMemory's own results."""

OTHERS: dict[str, Any] = {
    "triples": [("Ann", "adopted", "Miso"), {"subject": "Miso", "relation": "is a", "object": "cat"}, "(Bob, rides, bike)"],
    "chunks": [{"text": "I adopted a cat.", "time": "3 March"}, "Chunk 2: 19 March The plants fell."],
    "summaries": [{"session_id": 3, "time": "8 May", "summary": "Ann starts as a gardener."}],
}  # fmt: skip


def test_what_licomemory_finds_are_units() -> None:
    assert result_units(RESULT) == [
        MemoryUnit(
            "Session 3 (2023/05/08): Keys: May 8th, garden, Miso\nWork: Ann starts as a gardener.\nPets: Miso sleeps in a flower pot.",
            key="summary of Session 3 (2023/05/08)",
        ),
        MemoryUnit("2023/03/03 Ann: I adopted a cat."),
        MemoryUnit("2023/03/19 Ann: The plants fell."),
        MemoryUnit("(Ann, adopted, Miso); (Miso, is a, cat)", key="triples", encoded=False),
    ]


def test_themes_stand_by_number_however_the_model_wrote_them() -> None:
    context = {f"{name}_{n}": f"{name} {n}" for n in (10, 9, 1) for name in ("summary", "theme")}
    (unit,) = result_units({"summaries": [{"session_id": "s", "context": context}]})
    assert unit.text == "Session s: theme 1: summary 1\ntheme 9: summary 9\ntheme 10: summary 10"


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        ({"keys": "a, b", "context": {}}, "Keys: a, b"),
        ({"keys": ["a"], "context": {"summary_1": "No title."}}, "No title."),
        ({"context": {"theme_1": "No summary", "other": "x"}}, "No summary"),
        ({"context": " A text. "}, "A text."),
        ({"keys": "a, b", "context": {"theme_1": "Pets"}, "text": "Its own text."}, "Its own text."),
    ],
)
def test_a_summary_has_its_own_text_or_what_there_is_of_keys_and_themes(summary: dict[str, Any], text: str) -> None:
    assert result_units({"summaries": [summary]}) == [MemoryUnit(text)]


def test_a_revised_summary_is_the_same_unit() -> None:
    (known,) = RESULT["summaries"]
    revised = known | {"context": known["context"] | {"theme_3": "Bikes", "summary_3": "Bob welds."}}
    (before, *_), (after,) = result_units(RESULT), result_units({"summaries": [revised]})
    assert after.key == before.key and after.text == f"{before.text}\nBikes: Bob welds."


def test_a_summary_that_could_not_be_written_is_left_out() -> None:
    failed = {"session_id": "4", "session_time": "2023/05/09", "summary_status": "failed", "error": "timeout"}
    assert result_units({"summaries": [failed, *RESULT["summaries"]]}) == result_units(RESULT)[:1]


def test_ranks_are_left_out_of_the_text() -> None:
    assert result_units(OTHERS) == [
        MemoryUnit("Session 3 (8 May): Ann starts as a gardener.", key="summary of Session 3 (8 May)"),
        MemoryUnit("3 March I adopted a cat."),
        MemoryUnit("19 March The plants fell."),
        MemoryUnit("(Ann, adopted, Miso); (Bob, rides, bike); (Miso, is a, cat)", key="triples", encoded=False),
    ]


def test_ranks_may_stand_before_the_text() -> None:
    chunks = result_units(OTHERS, ranks=True)[1:3]
    assert [(unit.label, unit.text) for unit in chunks] == [
        ("Chunk 1:", "3 March I adopted a cat."),
        ("Chunk 2:", "19 March The plants fell."),
    ]


def test_the_rank_of_a_chunk_does_not_change_its_text() -> None:
    other = {"chunks": [*reversed(OTHERS["chunks"])]}
    assert {unit.text for unit in result_units(other)} == {unit.text for unit in result_units(OTHERS)[1:3]}


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
        ({"summaries": [{"session_id": "3", "context": {}}]}, "or a context with theme_1"),
        ({"triples": [("a", "b")]}, r"\('a', 'b'\) is no triple"),
    ],
)
def test_what_has_no_such_form_is_named(result: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        result_units(result)


# -- on an engine ------------------------------------------------------------------------------------------------------


SUMMARY = {
    "session_id": "1",
    "session_time": "2023/03/03",
    "keys": "March 3rd, Ann, Bob, cat, bike",
    "context": {
        "theme_1": "Pets",
        "summary_1": "Ann adopted a grey cat from the shelter on Mill Road and named her Miso.",
        "theme_2": "Theft",
        "summary_2": "Bob's bike was stolen near the station, and he walked home in the rain for an hour.",
    },
}


class Processor:
    """Stands where LiCoMemory has its graph: finds the turns that share a word with the question, the best first."""

    async def process_query(self, question: str, question_time: str = "") -> Mapping[str, Any]:
        words = {word for word in question.lower().strip("?").split() if len(word) > 3}
        ranked = sorted(
            (turn for turn in TURNS if words & {*turn[2].lower().strip(".").split()}),
            key=lambda turn: -len(words & {*turn[2].lower().split()}),
        )
        return {
            "chunks": [
                f"{when} {speaker}: {text} It was written down that day, word by word, and read again later."
                for when, speaker, text in ranked
            ],
            "triples": [{"src": speaker, "relation": "wrote on", "tgt": when} for when, speaker, _ in ranked],
            "summaries": [SUMMARY],
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
