"""Questions over edited documents: what each kind of edit changes, and where the answer lies."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from agentcache.errors import ConfigError
from agentcache.evaluation.qa_data import load_questions
from agentcache.evaluation.qa_edits import CARRIERS, QA_EDITS, make_items

QUESTIONS = load_questions().questions
BY_ID = {question.id: question for question in QUESTIONS}


def texts(messages):
    """Returns the documents of a chat."""
    return messages[1]["content"].split("\n\n")[1:]


@pytest.fixture(scope="module")
def items():
    """Many: every kind with every place of the answer, over several seeds."""
    return [item for seed in range(40) for item in make_items(QUESTIONS, 8, seed=seed, context=900)]


def test_items_are_seeded_and_each_asks_another_question():
    made = make_items(QUESTIONS, 8, seed=1, context=900)
    assert made == make_items(QUESTIONS, 8, seed=1, context=900)
    assert made != make_items(QUESTIONS, 8, seed=2, context=900)
    assert len({item.task for item in made}) == 8
    assert [item.kind for item in made] == [*QA_EDITS]


def test_every_kind_meets_every_place_that_it_can(items):
    found = {(item.kind, item.carrier) for item in items}
    expected = {(kind, carrier) for kind in QA_EDITS for carrier in CARRIERS}
    assert found == expected - {(kind, carrier) for kind in ("delete", "clear") for carrier in ("bridge", "inside")}
    few = Counter(item.carrier for item in make_items(QUESTIONS, 10, seed=0, context=900))
    assert few["behind"] > few["inside"] > 0


def test_the_new_chat_asks_last_and_the_old_one_does_not_know_the_question(items):
    for item in items:
        assert BY_ID[item.task].text in item.new[-1]["content"]
        assert not any(BY_ID[item.task].text in message["content"] for message in item.old)
        assert [message["role"] for message in item.new] == ["system", "user", "assistant", "user"]
        assert texts(item.old) != texts(item.new)


def test_the_new_chat_has_every_needed_document(items):
    for item in items:
        if item.kind == "summarise":  # there it may be shorter
            continue
        for passage in BY_ID[item.task].gold:
            assert f"{passage.title}\n{passage.text}" in texts(item.new)


def test_a_summary_keeps_the_answer(items):
    summaries = [item for item in items if item.kind == "summarise" and item.carrier == "inside"]
    assert summaries
    for item in summaries:
        question = BY_ID[item.task]
        told = "\n".join(texts(item.new)).lower()
        if question.answers[0].lower() in question.carrier.text.lower():
            assert question.answers[0].lower() in told


def changed(item):
    """Returns the numbers of the first and the last changed document of the new chat."""
    old, new = texts(item.old), texts(item.new)
    first = common(old, new)
    return first, len(new) - 1 - common(old[first:][::-1], new[first:][::-1])


def common(old, new):
    return next(
        (at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), min(len(old), len(new))
    )


def place(item, passage):
    return texts(item.new).index(f"{passage.title}\n{passage.text}")


def test_the_carrier_lies_where_it_is_said_to(items):
    seen = Counter()
    for item in items:
        question = BY_ID[item.task]
        first, last = changed(item)
        if item.kind == "summarise" and item.carrier in ("inside", "bridge"):
            continue
        places = [place(item, passage) for passage in question.gold]
        carrier = place(item, question.carrier)
        if item.carrier == "before":
            assert max(places) < first
        elif item.carrier == "inside":
            assert first <= carrier <= max(last, first + 1)
        else:
            assert carrier > last
            assert (min(places) > last) == (item.carrier == "behind")
        seen[item.carrier] += 1
    assert set(seen) == set(CARRIERS)


def test_what_an_edit_changes(items):
    by_kind = {kind: [item for item in items if item.kind == kind] for kind in QA_EDITS}
    documents = {kind: [(len(texts(i.old)), len(texts(i.new))) for i in found] for kind, found in by_kind.items()}
    for kind in ("replace", "update", "refresh", "reorder", "clear"):
        assert all(old == new for old, new in documents[kind])
    assert all(old + 1 == new for old, new in documents["insert"])
    assert all(old - 1 == new for old, new in documents["delete"])
    assert all(old - 1 == new for old, new in documents["summarise"])
    for item in by_kind["reorder"]:
        assert Counter(texts(item.old)) == Counter(texts(item.new))
    for item in by_kind["clear"]:
        assert sum("cleared" in text for text in texts(item.new)) == 1
    for item in by_kind["update"]:
        pairs = [(a, b) for a, b in zip(texts(item.old), texts(item.new), strict=False) if a != b]
        assert len(pairs) == 1
        assert (
            pairs[0][0].split("\n")[0] == pairs[0][1].split("\n")[0] or len(pairs[0][1].split("\n")[1].split(". ")) < 2
        )


def test_an_older_form_of_the_answers_document_tells_another_answer(items):
    updated = [item for item in items if item.kind == "update" and item.carrier == "inside"]
    told = 0
    for item in updated:
        question = BY_ID[item.task]
        carrier = question.carrier
        if question.answers[0].lower() in ("yes", "no") or question.answers[0].lower() not in carrier.text.lower():
            continue
        old = next(text for text in texts(item.old) if text.startswith(f"{carrier.title}\n"))
        assert question.answers[0].lower() not in old.partition("\n")[2].lower()
        told += 1
    assert told


def test_a_smaller_context_has_fewer_documents_and_leaves_out_long_ones():
    def length(context):
        return sum(len(item.new[1]["content"]) for item in make_items(QUESTIONS, 4, seed=0, context=context))

    assert length(350) < length(900) < length(2000)
    with pytest.raises(ConfigError, match=r"8 are wanted \(\d+ have longer documents than --context 100"):
        make_items(QUESTIONS, 8, seed=0, context=100)


def test_too_few_questions_and_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="12 questions can be asked, 13 are wanted"):
        make_items(QUESTIONS, 13, seed=0, context=3000)
    with pytest.raises(ConfigError, match="'paint'"):
        make_items(QUESTIONS, 1, seed=0, context=900, kinds=("paint",))
    with pytest.raises(ConfigError, match="data are too few"):
        make_items(QUESTIONS[:1], 1, seed=0, context=9000)


def test_documents_of_ones_own_have_no_titles_to_tell_them_by(tmp_path):
    rows = [
        {
            "task": n,
            "question": f"Who is {n}?",
            "answers": [f"Name{n}"],
            "documents": [f"It is Name{n}.", f"Of {n} more."],
            "gold": [1],
        }
        for n in range(6)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for item in make_items(load_questions(path).questions, 6, seed=0, context=64):
        told = [text.partition("\n")[2] for text in texts(item.new)]
        assert len(told) == len(set(told)) >= 3
