"""Questions with answers, from the forms of public data sets."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from agentcache.errors import ConfigError
from agentcache.evaluation.qa_data import holds_answer, load_questions, without_calibration
from agentcache.profiling.datasets import load_dataset

ROWS = {
    "hotpotqa": {
        "_id": "h1",
        "question": "Where?",
        "answer": "Delhi",
        "supporting_facts": [["B", 0]],
        "context": [["A", ["No.", " Not here."]], ["B", ["In Delhi."]]],
    },
    "musique": {
        "id": "m1",
        "question": "Who?",
        "answer": "G. S. Hall",
        "answer_aliases": ["Stanley Hall", "G. S. Hall"],
        "paragraphs": [
            {"title": "A", "paragraph_text": "Nobody.", "is_supporting": False},
            {"title": "B", "paragraph_text": "It was\nStanley Hall.", "is_supporting": True},
        ],
    },
    "2wiki": {
        "i": 7,
        "question": "Are both?",
        "answer": "no",
        "ctx": [{"title": "A", "text": "x", "gold": True}, {"title": "B", "text": "y", "gold": True}],
    },
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "answers", "gold", "carrier"),
    [
        ("hotpotqa", ("Delhi",), ["B"], "B"),
        ("musique", ("G. S. Hall", "Stanley Hall"), ["B"], "B"),
        ("2wiki", ("no",), ["A", "B"], "B"),
    ],
)
def test_each_form_is_read_with_its_answers(tmp_path, name, answers, gold, carrier):
    path = write(tmp_path / "data.jsonl", ROWS[name])
    found = load_questions(path)
    [question] = found.questions
    assert (found.name, question.answers, question.carrier.title) == (name, answers, carrier)
    assert [passage.title for passage in question.gold] == gold
    assert "\n" not in "".join(passage.text for passage in question.passages)
    dataset = load_dataset(path)
    assert (found.hash, [question.id]) == (dataset.hash, [task.id for task in dataset.tasks])


def test_the_sample_has_answers():
    found = load_questions()
    assert len(found.questions) == 12
    assert all(len(question.gold) == 2 for question in found.questions)
    assert {q.id for q in found.questions} == {task.id for task in load_dataset().tasks}


def test_own_documents(tmp_path):
    row = {"task": "t", "question": "Q?", "answers": ["two", "2"], "documents": ["one", "two"], "gold": [2]}
    [question] = load_questions(write(tmp_path / "mine.jsonl", row)).questions
    assert (question.id, question.answers, question.carrier.text) == ("mine-t", ("two", "2"), "two")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": None}, "row 0: no question with answers"),
        ({"answer": " "}, "an answer is empty"),
        ({"supporting_facts": 3}, "row 0: no question with answers"),
    ],
)
def test_rows_without_an_answer_are_refused(tmp_path, change, message):
    row = {key: value for key, value in {**ROWS["hotpotqa"], **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        load_questions(write(tmp_path / "data.jsonl", row))


def test_rows_of_trajectories_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no question with answers.*known: paragraphs with answer"):
        load_questions(write(tmp_path / "data.jsonl", {"trajectory": []}))


def test_two_data_sets_and_two_tasks_alike_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="2wiki and hotpotqa"):
        load_questions(write(tmp_path / "both.jsonl", ROWS["hotpotqa"], ROWS["2wiki"]))
    with pytest.raises(ConfigError, match="'hotpotqa-h1' is there twice"):
        load_questions(write(tmp_path / "twice.jsonl", ROWS["hotpotqa"], ROWS["hotpotqa"]))


@pytest.mark.parametrize(
    ("text", "answers", "held"),
    [
        ("born in DELHI.", ["Delhi"], True),
        ("the Delhites", ["Delhi"], False),
        ("no, it is", ["no"], False),  # no word to look for
        ("C++ (1985)", ["C++"], True),
    ],
)
def test_an_answer_is_whole_words(text, answers, held):
    assert holds_answer(text, answers) is held


def profile(*sources):
    return SimpleNamespace(data=[SimpleNamespace(dataset=name, hash=hash_) for name, hash_ in sources])


def test_tasks_of_the_calibration_are_left_out(tmp_path):
    first = {**ROWS["hotpotqa"], "_id": load_questions().questions[0].id.removeprefix("hotpotqa-")}
    measured = load_questions(write(tmp_path / "data.jsonl", first, ROWS["hotpotqa"]))
    kept, left_out = without_calibration([measured], None, ())
    assert (len(kept[0].questions), left_out) == (2, 0)
    # A task of the shipped sample is one of HotpotQA, whatever file it is read from.
    kept, left_out = without_calibration([measured], profile(("hotpotqa", load_questions().hash)), ())
    assert ([q.id for q in kept[0].questions], left_out) == (["hotpotqa-h1"], 1)
    kept, left_out = without_calibration([measured], profile(("hotpotqa", measured.hash)), ())
    assert (kept[0].questions, left_out) == ((), 2)


def test_a_calibration_that_is_not_at_hand_must_be_named(tmp_path):
    used = write(tmp_path / "used.jsonl", {**ROWS["hotpotqa"], "_id": "h2"})
    measured = load_questions(write(tmp_path / "data.jsonl", ROWS["hotpotqa"], {**ROWS["hotpotqa"], "_id": "h2"}))
    made_of = profile(("hotpotqa", load_questions(used).hash), ("ama_bench", "0" * 32))
    with pytest.raises(ConfigError, match="--calibrated-on"):
        without_calibration([measured], made_of, ())
    kept, left_out = without_calibration([measured], made_of, [used])
    assert ([q.id for q in kept[0].questions], left_out) == (["hotpotqa-h1"], 1)
