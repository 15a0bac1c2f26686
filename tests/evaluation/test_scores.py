"""Scores against values worked out by hand and the conventions of the official scripts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.evaluation.scores import SCORES, bleu1, exact_match, normalise, rouge1, score_reply, task_f1

ALL = (task_f1, exact_match, rouge1, bleu1)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Cat, an animal!", "cat animal"),
        ("A.B.C.", "abc"),
        ("  theatre  of the absurd ", "theatre of absurd"),
        ("O'Neill—Ünal", "oneill—ünal"),
        ("the", ""),
    ],
)
def test_texts_are_normalised_as_in_squad(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("reply", "answer", "f1"),
    [
        ("New York City", "the new york city.", 1.0),
        ("in New York", "New York City", 2 / 3),  # 2 common of 3 and 3
        ("Paris", "London", 0.0),
        ("Paris Paris Paris", "Paris", 0.5),  # a word counts as often as both have it: P 1/3, R 1
        ("yes", "Yes.", 1.0),
        ("yes it is", "yes", 0.0),  # HotpotQA: a closed answer counts whole or not at all
        ("no", "no man", 0.0),
        ("", "the", 1.0),
        ("", "Paris", 0.0),
    ],
)
def test_task_f1(reply, answer, f1):
    assert task_f1(reply, [answer]) == pytest.approx(f1)


def test_exact_match_ignores_case_articles_and_punctuation_alone():
    assert exact_match("The Beatles!", ["beatles"]) == 1
    assert exact_match("The Beatles band", ["beatles"]) == 0


@pytest.mark.parametrize(
    ("reply", "answer", "rouge"),
    [
        ("the cat sat", "the cat sat on the mat", 2 * 1 * 0.5 / 1.5),  # 3 of 3 and 3 of 6; articles count here
        ("running dogs", "dog runs", 1.0),  # by their stems
        ("dogs", "cats", 0.0),
    ],
)
def test_rouge1(reply, answer, rouge):
    assert rouge1(reply, [answer]) == pytest.approx(rouge)


@pytest.mark.parametrize(
    ("reply", "answer", "bleu"),
    [
        ("sat mat mat", "sat on mat", 2 / 3),  # clipped: one of two mats counts; no brevity penalty at equal length
        ("sat", "sat on mat", math.exp(1 - 3)),  # precision 1, brevity exp(1 − 3/1)
        ("dog", "sat on mat", 0.0),
        ("", "mat", 0.0),
    ],
)
def test_bleu1(reply, answer, bleu):
    assert bleu1(reply, [answer]) == pytest.approx(bleu)


@pytest.mark.parametrize("score", ALL)
def test_the_best_accepted_answer_counts(score):
    assert score("Paris", ["London", "Paris"]) == 1
    assert score("Paris", ["London"]) == 0


@pytest.mark.parametrize("score", [*ALL, score_reply])
def test_no_accepted_answer_is_an_error(score):
    with pytest.raises(ValueError, match="'Paris' has no accepted answer"):
        score("Paris", [])


@given(reply=st.text(max_size=40), answer=st.text(max_size=40))
def test_scores_lie_between_0_and_1_and_a_match_is_full(reply, answer):
    found = score_reply(reply, [answer])
    assert tuple(found) == SCORES
    assert all(0 <= value <= 1 for value in found.values())
    if found["em"]:
        assert found["f1"] == found["bleu1"] == 1
