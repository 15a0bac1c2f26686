from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.profiling.datasets import load_dataset
from agentcache.profiling.edits import EDIT_KINDS, Edit, Task, Turn, lead_sentences, make_edits, split

SAMPLE = load_dataset("sample").tasks

words = st.text(alphabet="abcdefgh .", min_size=1, max_size=30)
turns = st.builds(Turn, words, st.lists(words, min_size=1, max_size=4).map(tuple))
tasks = st.lists(st.lists(turns, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5).map(
    lambda each: [Task(f"t{i}", f"d{i % 2}", "What?", own, "Be brief." if i % 2 else "") for i, own in enumerate(each)]
)


def texts(edit: Edit, side: str) -> list[str]:
    return [message["content"] for message in getattr(edit, side)]


def sources(given_tasks: list[Task]) -> set[str]:
    return {text for task in given_tasks for turn in task.turns for text in turn.results}


@given(tasks, st.integers(0, 5), st.integers(1, 4), st.integers(1, 400), st.integers(0, 400))
@settings(deadline=None, max_examples=60)
def test_edits_are_chained_seeded_changes_of_chats(
    of: list[Task], seed: int, per_task: int, low: int, more: int
) -> None:
    arguments: dict[str, Any] = {"seed": seed, "per_task": per_task, "characters": (low, low + more)}
    edits = list(make_edits(of, **arguments))
    assert edits == list(make_edits(of, **arguments))
    assert len({edit.id for edit in edits}) == len(edits)
    assert max(Counter(edit.task for edit in edits).values(), default=0) <= per_task
    for edit in edits:
        assert edit.old != edit.new
        for side in (edit.old, edit.new):
            roles = [message["role"] for message in side if message["role"] != "system"]
            assert roles == [role for role, _ in zip(itertools.cycle(["user", "assistant"]), roles, strict=False)]
            assert roles[-1] == "user"
    for before, after in itertools.pairwise(edits):
        assert before.task != after.task or before.new == after.old


@given(tasks, st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_all_text_but_frames_is_real(of: list[Task], seed: int) -> None:
    real = sources(of)
    leads = {lead_sentences(text) for text in real}
    for edit in make_edits(of, seed=seed, per_task=3, characters=(50, 300)):
        question, *rest = [message["content"] for message in edit.new if message["role"] == "user"]
        for line in question.split("\n")[3:]:
            assert line.removeprefix("- ") in leads
        assert all(part in real for message in rest for part in message.split("\n\n"))


@pytest.mark.parametrize("kind", EDIT_KINDS)
def test_each_kind_does_what_it_says(kind: str) -> None:
    edits = list(make_edits(SAMPLE, seed=3, characters=(8_000, 12_000), kinds=[kind]))
    assert edits and {edit.kind for edit in edits} == {kind}
    for edit in edits:
        old, new = texts(edit, "old"), texts(edit, "new")
        if kind == "summarise":
            assert "Summary of the earlier steps:" in new[0] and len(new) < len(old)
        elif kind == "delete":
            assert sum(map(len, new)) < sum(map(len, old)) and new[0] == old[0]
        else:
            changed = [at for at, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
            assert len(changed) == 1
        if kind == "refresh":
            (at,) = changed
            kept = set(old[at].split("\n\n")) & set(new[at].split("\n\n"))
            assert len(kept) >= len(old[at].split("\n\n")) * 2 // 3 - 1


def test_prompts_have_about_the_asked_length() -> None:
    first = list(make_edits(SAMPLE, seed=0, per_task=1, characters=(6_000, 9_000)))
    lengths = [sum(len(text) for text in texts(edit, "old")[1:]) for edit in first]
    assert all(4_500 <= length <= 9_100 for length in lengths), lengths
    assert max(lengths) - min(lengths) > 1_000


def test_another_seed_gives_other_edits() -> None:
    assert list(make_edits(SAMPLE, seed=0)) != list(make_edits(SAMPLE, seed=1))


def test_a_task_alone_is_still_edited_without_text_of_others() -> None:
    one = [SAMPLE[0]]
    edits = list(make_edits(one, seed=0, per_task=4))
    assert edits and {edit.kind for edit in edits} <= {"delete", "summarise"}


def test_nothing_to_edit_gives_no_edits() -> None:
    assert list(make_edits([Task("a", "d", "What?", (Turn("look", ("dark",)),))], seed=0)) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kinds": ["rename"]}, "edit kinds \\['rename'\\] are not allowed"),
        ({"kinds": []}, "edit kinds \\[\\] are not allowed"),
        ({"characters": (0, 10)}, "characters=\\(0, 10\\)"),
        ({"characters": (20, 10)}, "characters=\\(20, 10\\)"),
        ({"per_task": 0}, "per_task=0"),
    ],
)
def test_what_is_not_allowed_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(make_edits(SAMPLE, seed=0, **arguments))


@given(st.integers(0, 100), st.floats(0, 1))
def test_a_split_is_disjoint_and_whole(seed: int, share: float) -> None:
    train, rest = split(SAMPLE, seed=seed, share=share)
    assert sorted([*train, *rest], key=lambda task: task.id) == sorted(SAMPLE, key=lambda task: task.id)
    assert not {task.id for task in train} & {task.id for task in rest}


def test_the_split_of_a_task_depends_on_no_other_task() -> None:
    train, _ = split(SAMPLE, seed=4, share=0.5)
    fewer, _ = split(SAMPLE[3:], seed=4, share=0.5)
    assert fewer == [task for task in train if task in SAMPLE[3:]]
    many = [Task(f"t{i}", "d", "", ()) for i in range(2000)]
    assert 0.65 < len(split(many, seed=0, share=0.7)[0]) / 2000 < 0.75


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"share=1\.5"):
        split(SAMPLE, seed=0, share=1.5)


def test_lead_sentences() -> None:
    text = " It rained. Dr. Who came (late). Then nothing!"
    assert lead_sentences(text) == "It rained."
    assert lead_sentences(text, 9) == text.strip()
    assert lead_sentences("no end") == "no end"
