"""Memories from each form of data, questions about them, and which memories a question is asked with. The texts are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import ConfigError
from agentcache.evaluation.memory_data import MemorySet, choose, load_memories
from agentcache.evaluation.memory_retrieval import recall, retrieve


def turn(session: int, number: int, text: str, **more: Any) -> dict[str, Any]:
    return {"speaker": "Ada" if number % 2 else "Ben", "dia_id": f"D{session}:{number}", "text": text, **more}


LOCOMO = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ada",
        "speaker_b": "Ben",
        "session_1_date_time": "9:00 am on 3 May, 2021",
        "session_1": [
            turn(1, 1, "I planted tomatoes behind the shed."),
            turn(1, 2, "Nice!\nMine froze.", blip_caption="a photo of a frozen bed"),
            turn(1, 3, "The goat ate half of them " + "again and " * 20),
        ],
        "session_2_date_time": "8:00 pm on 9 June, 2021",
        "session_2": [turn(2, 1, "We sailed to the island on Sunday.")],
    },
    "qa": [
        {"question": "What did Ada plant?", "answer": "tomatoes", "evidence": ["D1:1"], "category": 4},
        {"question": "When did they sail?", "answer": 2021, "evidence": ["D2:1; D1:9"], "category": 2},
        {"question": "Is Ada patient?", "answer": "Likely yes; she planted again", "evidence": [], "category": 3},
        {"question": "What did Ben plant?", "adversarial_answer": "tomatoes", "evidence": ["D1:1"], "category": 5},
    ],
}
AMA = {
    "episode_id": "7",
    "domain": "Text 2 SQL",
    "task": "Count rows.",
    "trajectory": [
        {"turn_idx": 0, "action": "—", "observation": ""},
        {"turn_idx": 1, "action": "ls", "observation": "orders.json"},
        {"turn_idx": 2, "action": "SELECT COUNT(*) FROM orders", "observation": "x" * 250 + " 4711"},
        {"turn_idx": 3, "action": "submit", "observation": "ok"},
    ],
    "qa_pairs": [
        {"question": "What did step 2 execute?", "answer": "a count", "type": "A", "sub_type": ""},
        {"question": "What happened between step 1 and step 3?", "answer": "a count", "type": "A", "sub_type": ""},
        {"question": "Why step 3?", "answer": "because", "type": "B", "sub_type": ""},
        {"question": "At step 3, everything?", "answer": "word " * 65, "type": "A", "sub_type": ""},
    ],
}


def load(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> MemorySet:
    file = tmp_path / "data.json"
    file.write_text(json.dumps(rows))
    return load_memories(file, **options)


def test_a_dialogue_becomes_units_of_one_session_with_its_date(tmp_path: Path) -> None:
    found = load(tmp_path, [LOCOMO], characters=200)
    first, second, third = found.memories["conv-1"]
    assert first.text == (
        "Conversation at 9:00 am on 3 May, 2021:\nAda: I planted tomatoes behind the shed.\n"
        "Ben: Nice! Mine froze. [shares a photo of a frozen bed]\n"
    )
    assert (first.holds, second.holds, third.holds) == ({"D1:1", "D1:2"}, {"D1:3"}, {"D2:1"})
    assert len(second.text) > 200, "a turn is never cut"
    assert third.text.startswith("Conversation at 8:00 pm on 9 June, 2021:\n")


def test_locomo_questions_have_categories_and_evidence_that_is_there(tmp_path: Path) -> None:
    plant, sail, patient = load(tmp_path, [LOCOMO]).questions
    assert (plant.id, plant.category, plant.answers, plant.evidence) == (
        "conv-1/0",
        "single-hop",
        ("tomatoes",),
        {"D1:1"},
    )
    assert (sail.category, sail.answers, sail.evidence) == ("temporal", ("2021",), {"D2:1"})
    assert (patient.answers, patient.evidence) == (("Likely yes",), set())


def test_a_trajectory_becomes_steps_and_a_long_one_is_cut(tmp_path: Path) -> None:
    found = load(tmp_path, [AMA], characters=200)
    units = found.memories["Text 2 SQL/7"]
    assert units[0].text == "Step 1:\nAction: ls\nObservation: orders.json\n" and units[0].holds == {"1"}
    assert units[1].text.startswith("Step 2:\nAction: SELECT COUNT(*) FROM orders\nObservation: xxx")
    assert units[2].text.startswith("Step 2 (continued):\nxxx") and "4711" in units[2].text
    assert units[2].holds == {"2", "3"} and max(len(unit.text) for unit in units) <= 200
    assert "—" not in "".join(unit.text for unit in units), "a step without content is no memory"


def test_ama_bench_asks_for_what_happened_and_knows_the_steps_that_are_named(tmp_path: Path) -> None:
    one, several = load(tmp_path, [AMA]).questions
    assert (one.id, one.evidence) == ("Text 2 SQL/7/0", {"2"})
    assert several.evidence == {"1", "2", "3"}


def test_question_sets_are_memories_of_documents() -> None:
    found = load_memories()
    assert (found.name, len(found.questions)) == ("hotpotqa", 12)
    question = found.questions[0]
    units = found.memories[question.memory]
    assert len(units) == 10 and len(question.evidence) == 2
    assert sum(bool(unit.holds & question.evidence) for unit in units) == 2


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{**AMA, "qa_pairs": []}], "no question of ama_bench_recall"),
        ([LOCOMO, AMA], "is not as its first row says: KeyError: 'sample_id'"),
        ([{"strange": 1}], "known"),
    ],
)
def test_data_that_is_none_is_refused(tmp_path: Path, rows: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, rows)


def test_questions_are_drawn_evenly_over_categories_and_stay_with_their_memory() -> None:
    rows = [
        {
            **LOCOMO,
            "sample_id": f"conv-{at}",
            "qa": [
                {"question": f"What {at} {number}?", "answer": "x", "evidence": [], "category": 4 if number else 2}
                for number in range(10)
            ],
        }
        for at in range(4)
    ]
    from agentcache.evaluation.memory_data import _locomo

    data = _locomo(rows, 800)
    drawn = choose(data, 8, seed=0)
    assert sorted(q.category for q in drawn) == ["single-hop"] * 4 + ["temporal"] * 4
    memories = [q.memory for q in drawn]
    assert memories == sorted(memories), "each memory's questions come in a row"
    assert choose(data, 8, seed=0) == drawn and choose(data, 8, seed=1) != drawn
    assert {q.id for q in choose(data, 6, seed=0)} < {q.id for q in drawn}, "more items keep the earlier ones"
    with pytest.raises(ConfigError, match="40 questions, 41 are wanted"):
        choose(data, 41, seed=0)


def test_the_units_nearest_in_words_are_retrieved_and_recall_says_what_of_the_evidence_they_hold(
    tmp_path: Path,
) -> None:
    data = load(tmp_path, [LOCOMO], characters=120)
    units = data.memories["conv-1"]
    plant, sail, patient = data.questions
    near = retrieve("Who has been sailing to islands?", units, 2)
    assert units[near[0]].holds == {"D2:1"}, "stems are compared"
    assert retrieve(plant.text, units, 99) == retrieve(plant.text, units, len(units))
    assert sorted(retrieve(plant.text, units, 99)) == list(range(len(units)))
    assert retrieve("zzz", units, 2) == [0, 1], "of equally near ones the earlier comes first"
    assert recall(sail, [units[near[0]]]) == 1 and recall(plant, [units[near[0]]]) == 0
    assert recall(patient, units) is None
