"""Derived items: what an edit changes, what it must not change, and how a repair is scored."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.profiling.derived import (
    ChatFrame,
    DerivedItem,
    derived_items,
    is_kept,
    margin,
    margin_recovery,
)
from agentcache.profiling.derived_text import FORMS, Form
from agentcache.samples import load_hotpot_sample
from tests.evaluation.words import Words

NUMBERS = {"one": "1", "two": "2", "three": "3", "five": "5", "seven": "7", "nine": "9"}
FRAME = ChatFrame("<user> ", " <assistant> ")
BEHIND = [form for form in FORMS if form != "direct"]
DOCUMENTS = [paragraph.text for item in load_hotpot_sample() for paragraph in item.paragraphs]


def make(words: Words, **settings: Any) -> list[DerivedItem]:
    return derived_items(words.encode, DOCUMENTS, FRAME, **({"count": 3, "distance": 40} | settings))


@given(form=st.sampled_from(FORMS), distance=st.integers(0, 120), seed=st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_edits_change_their_spans_and_leave_all_other_rows_alone(form: Form, distance: int, seed: int) -> None:
    words = Words()
    for item in make(words, form=form, distance=distance, seed=seed):
        assert len(item.edits) == (2 if form == "two_edits" else 1)
        assert (len(item.old) == len(item.new)) == (form != "length")
        tail = len(item.new) - item.edit.stop
        assert item.old[: item.edit.start] == item.new[: item.edit.start] and item.old[-tail:] == item.new[-tail:]
        if form != "length":
            differ = {at for at, (a, b) in enumerate(zip(item.old, item.new, strict=True)) if a != b}
            assert differ == {at for run in item.edits for at in range(*run)}
        assert all(1 <= run.stop - run.start <= 6 for run in item.edits)
        assert item.old[item.old_query_start :] == item.new[item.query_start :]
        assert 0.25 <= item.edit.start / item.query_start <= 0.4


@given(form=st.sampled_from(BEHIND), distance=st.integers(0, 120), seed=st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_as_many_tokens_of_other_text_as_asked_for_stand_between_the_edit_and_the_carrier(
    form: Form, distance: int, seed: int
) -> None:
    words = Words()
    for item in make(words, form=form, distance=distance, seed=seed):
        assert item.edit.stop < item.carrier.start < item.carrier.stop <= item.query_start < len(item.new)
        line_end = item.edits[0].stop + 1  # the line break behind the key
        gap = item.carrier.start - line_end - (2 if distance else 0)  # and an empty line before the tables
        tables = 2 * len(words.encode("Lookup table, spring:\n- North: copper\n- South: coal\n"))
        links = 2 * len(words.encode("Alias of Orlan: Alpha\n")) + 2  # and an empty line before them
        assert distance <= gap <= distance + {"competing": tables, "chain": links, "two_edits": links}.get(form, 0)


@pytest.mark.parametrize("form", FORMS)
def test_the_boundary_is_the_end_of_the_edits_document(form: Form) -> None:
    words = Words()
    for distance in (0, 40):
        for item in make(words, form=form, distance=distance):
            stop = item.edits[-1].stop + item.boundary
            if distance or form == "direct":
                assert words.decode(item.new[stop - 1 : stop]) == "\n"
                assert item.boundary == 1  # the line break of the edited line
            else:
                assert stop >= item.carrier.stop


@pytest.mark.parametrize("form", BEHIND)
def test_both_answers_follow_from_the_alias_and_the_carrier(form: Form) -> None:
    words = Words()
    for item in make(words, form=form, count=8):
        table = dict(re.findall(r"- ([\w ]+): (\w+)", words.decode(item.new[slice(*item.carrier)])))
        for ids, start, value in (
            (item.old, item.old_query_start, item.old_value),
            (item.new, item.query_start, item.new_value),
        ):
            text, question = words.decode(ids[:start]), words.decode(ids[start:])
            aliases = dict(re.findall(r"Alias of (\w+): ([\w ]+)\n", text))
            codes = dict(re.findall(r"Code of (\w+): (\w+)\n", text))
            (name,) = [name for name in aliases if re.search(rf"\b{name}\b", question)]
            key = codes.get(aliases[name], aliases[name])
            assert words.encode(table[NUMBERS.get(key, key)]) == [*value]
        assert item.old_answer != item.new_answer and item.new_answer == item.new_value[0]


def test_the_edited_line_of_the_direct_form_states_the_answer() -> None:
    words = Words()
    for item in make(words, form="direct", distance=0, count=8):
        assert item.carrier == item.edit
        assert item.new[slice(*item.edit)] == item.new_value and item.old[slice(*item.edit)] == item.old_value


def test_items_of_one_draw_share_texts_name_and_values_across_forms() -> None:
    words = Words()
    direct = {item.draw: item for item in make(words, form="direct", distance=0, count=8)}
    derived = {item.draw: item for item in make(words, form="table", distance=0, count=8)}
    common = direct.keys() & derived.keys()
    assert len(common) >= 3
    for draw in common:
        one, two = direct[draw], derived[draw]
        assert one.new_value == two.new_value and one.old_value == two.old_value
        assert one.new[one.query_start :] == two.new[two.query_start :]
        shared = one.edit.start - len(words.encode("Lookup table value for the alias of Orlan: "))
        assert one.new[:shared] == two.new[:shared]


def test_a_reply_that_has_begun_goes_on_with_a_space_and_the_value() -> None:
    words = Words()

    def encode(text: str) -> list[int]:
        """Words with the space before them, as many models have them."""
        return [words.ids.setdefault(piece, len(words.ids)) for piece in re.findall(r" ?\w+|\s|[^\w\s]", text)]

    for item in derived_items(encode, DOCUMENTS, FRAME, count=3, distance=40, reply="It is {name}'s"):
        assert re.search(r" <assistant> It is [A-Z]\w+'s$", words.decode(item.new))
        value = words.decode(item.new_value)
        assert value.startswith(" ") and f":{value}\n" in words.decode(item.new[slice(*item.carrier)])


def test_no_word_of_an_item_stands_in_its_background() -> None:
    words = Words()
    documents = [*DOCUMENTS, *(f"{word} is here." for word in ("Kalmar", "alpha", "NORTH", "copper"))]
    for item in derived_items(words.encode, documents, FRAME, count=8, distance=40, form="table"):
        text = words.decode(item.new)
        name = re.search(r"Alias of (\w+): (\w+)\n", text)
        assert name is not None and len(re.findall(rf"\b{name[1]}\b", text)) == 2  # the alias and the question
        assert len(re.findall(rf"\b{name[2]}\b", text, re.IGNORECASE)) == 2  # the alias and the table


def test_the_tables_of_the_competing_form_differ_in_season_and_values_and_the_question_names_the_carriers() -> None:
    words = Words()
    places = set()
    for item in make(words, form="competing", count=10):
        tables = re.findall(r"Lookup table, (\w+):\n- \w+: (\w+)\n- \w+: (\w+)\n", words.decode(item.new))
        assert len({season for season, *_ in tables}) == 3
        assert len({value for _, *values in tables for value in values}) == 6
        carrier = words.decode(item.new[slice(*item.carrier)])
        asked = re.search(r"What is the (\w+) lookup", words.decode(item.new[item.query_start :]))
        assert asked is not None and f"table, {asked[1]}:" in carrier
        places.add([season for season, *_ in tables].index(asked[1]))
    assert places == {0, 1, 2}


def test_no_word_of_an_indirect_question_stands_in_the_carrier() -> None:
    words = Words()
    for item in make(words, form="indirect", count=10):
        carrier = set(re.findall(r"\w+", words.decode(item.new[slice(*item.carrier)]).lower()))
        question = words.decode(item.new[item.query_start :]).partition("?")[0]
        assert not carrier & set(re.findall(r"\w+", question.lower()))


def test_no_token_of_a_paraphrased_edit_stands_in_the_carrier() -> None:
    for form, shared in (("paraphrase", False), ("table", True)):
        for item in make(Words(), form=form, count=10):
            edited = {*item.old[slice(*item.edit)], *item.new[slice(*item.edit)]}  # same positions: equal lengths
            assert bool(edited & set(item.new[slice(*item.carrier)])) is shared


def test_items_depend_on_the_seed_alone_and_more_of_them_begin_with_the_same() -> None:
    words = Words()
    few, many, other = make(words), make(words, count=7), make(words, seed=1)
    assert many[:3] == few
    assert not set(other) & set(few)


def test_the_prompt_holds_the_frame_and_as_much_real_text_as_was_asked_for() -> None:
    words = Words()
    for item in make(words, filler_tokens=700):
        text = words.decode(item.new)
        assert text.startswith(FRAME.opening) and text.endswith(FRAME.closing)
        assert 700 <= len(item.new) < 700 + 100 + max(len(words.encode(text)) for text in DOCUMENTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"form": "tabel"},
            "form='tabel' is not known; there are direct, table, indirect, competing, paraphrase, chain, two_edits, length",
        ),
        ({"count": 0}, "count=0"),
        ({"distance": -1}, "distance=-1 < filler_tokens"),
        ({"distance": 500}, "distance=500 < filler_tokens"),
        ({"filler_tokens": 0}, "filler_tokens=0"),
    ],
)
def test_arguments_that_are_not_allowed_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(Words(), **settings)


@pytest.mark.parametrize("documents", [[], ["a text", ""]])
def test_documents_without_text_are_refused(documents: list[str]) -> None:
    with pytest.raises(ConfigError, match="at least one text, and no empty one"):
        derived_items(Words().encode, documents, FRAME, count=1, distance=0)


def test_a_tokenizer_that_cannot_tell_the_answers_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 of 2 items after 100 draws: this tokenizer"):
        derived_items(lambda text: [0] * len(text), DOCUMENTS, FRAME, count=2, distance=0)


def test_the_frame_is_the_chat_templates_text_around_the_message() -> None:
    def render(messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"

    frame = ChatFrame.of(render)
    assert frame.opening.startswith("<system>") and frame.opening.endswith("</><user>")
    assert frame.closing == "</><assistant>"
    with pytest.raises(ConfigError, match="does not give the user's message"):
        ChatFrame.of(lambda messages: render(messages).upper())


def test_the_margin_compares_the_two_answers() -> None:
    item = make(Words())[0]
    logprobs = {item.old_answer: -3.0, item.new_answer: -0.5, -1: -0.25}
    assert margin(logprobs, item) == 2.5
    with pytest.raises(ValueError, match="lack the answers"):
        margin({item.old_answer: -3.0}, item)


def test_margin_recovery_is_nought_without_repair_and_one_for_a_full_prefill() -> None:
    assert margin_recovery(-6.0, -6.0, 4.0) == 0
    assert margin_recovery(4.0, -6.0, 4.0) == 1
    assert margin_recovery(-1.0, -6.0, 4.0) == 0.5
    with pytest.raises(ValueError, match="cannot tell a repair from none"):
        margin_recovery(1.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("stale", "oracle", "kept"),
    [(-2.0, 1.0, True), (-2.0, -0.5, False), (0.0, 0.0, False), (0.7, 1.0, False), (0.3, 1.0, True)],
)
def test_an_item_is_kept_when_the_model_answers_it_and_the_edit_matters(
    stale: float, oracle: float, kept: bool
) -> None:
    assert is_kept(stale, oracle) is kept


def test_the_module_is_quick_to_import() -> None:
    code = "import sys, agentcache.profiling.derived; assert not {'torch', 'vllm', 'transformers', 'sklearn'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
