"""A prompt that goes on from others is read off their shapes, and reads as if it were rendered with marks."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.episodes.render import Renderer
from tests.episodes.families import TEMPLATES
from tests.episodes.test_render_spans import CHAT

NAMES = sorted(TEMPLATES)


def call(number: int) -> dict:
    function = {"name": "search", "arguments": {"q": f"record {number}", "deep": number % 2 == 0}}
    return {
        "role": "assistant",
        "content": "" if number % 2 else "i look",
        "tool_calls": [{"id": f"call_{number:04}", "type": "function", "function": function}],
    }


def result(number: int, text: str = "madrid, said the tool") -> dict:
    return {"role": "tool", "content": f"{text} {number}", "tool_call_id": f"call_{number:04}"}


def agent_run(turns: int) -> list[dict]:
    chat = [{"role": "system", "content": "you are the tool"}, {"role": "user", "content": "capitals?"}]
    return [*chat, *(message for number in range(turns) for message in (call(number), result(number)))]


def same(one, two) -> bool:
    return (
        one.token_ids.tolist() == two.token_ids.tolist()
        and (one.spans, one.boundaries, one.text, one.spliced_tokens)
        == (two.spans, two.boundaries, two.text, two.spliced_tokens)
    )  # fmt: skip


@pytest.fixture
def counted(monkeypatch):
    """How often the marks of a renderer were set."""
    found = []
    locate = Renderer._locate
    monkeypatch.setattr(
        Renderer, "_locate", lambda self, text, chat, *rest: found.append(len(chat)) or locate(self, text, chat, *rest)
    )
    return found


@pytest.mark.parametrize("name", ["chatml", "openers", "smollm2"])
def test_an_agents_next_call_is_rendered_once_whatever_was_cleared(family, smollm2, counted, name):
    warm = Renderer(smollm2 if name == "smollm2" else family(name))
    warm.render(agent_run(6))
    counted.clear()
    chat = agent_run(7)
    chat[3] = {**chat[3], "content": "[cleared]"}
    found = warm.render(chat)
    assert all(size == 3 for size in counted) and len(counted) <= 1  # the call that is new, in a chat of three
    assert same(found, Renderer(smollm2 if name == "smollm2" else family(name)).render(chat))


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_revision_reads_as_with_marks(family, renderer, name):
    warm = renderer(name)
    chats = [CHAT, agent_run(4), agent_run(5)]
    summary = [chats[2][0], {"role": "user", "content": "summary: hello", "id": "s"}, *chats[2][-2:]]
    swapped = [*chats[2][:3], result(1), *chats[2][4:]]
    grown = [*CHAT, {"role": "assistant", "content": "hello again"}, {"role": "user", "content": "  and now?\n"}]
    for chat in (*chats, summary, swapped, CHAT[1:], grown, CHAT[:-1], chats[2], CHAT):
        for prompt in (True, False):
            found = warm.render(chat, add_generation_prompt=prompt)
            assert same(found, Renderer(family(name)).render(chat, add_generation_prompt=prompt)), (chat, prompt)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_edits_of_a_run_read_as_with_marks(family, name, data):
    warm, chat = Renderer(family(name)), agent_run(3)
    words = st.sampled_from(
        ["", " ", "hello", "the capital\n\nof france", "<think>\na\n</think>\n\nb", "5 ", "\nx", "madrid"]
    )
    for step in range(4):
        what = data.draw(st.sampled_from(["turn", "user", "edit", "drop", "reply"]))
        if what == "turn":
            chat = [*chat, call(10 + step), result(10 + step, data.draw(words))]
        elif what == "user":
            chat = [*chat, {"role": "user", "content": data.draw(words)}]
        elif what == "reply":
            chat = [*chat, {"role": "assistant", "content": data.draw(words)}]
        elif what == "edit":
            at = data.draw(st.integers(0, len(chat) - 1))
            chat = [*chat[:at], {**chat[at], "content": data.draw(words)}, *chat[at + 1 :]]
        elif len(chat) > 3:
            at = data.draw(st.integers(1, len(chat) - 1))
            chat = [*chat[:at], *chat[at + 1 :]]
        given_chat = copy.deepcopy(chat)
        assert same(warm.render(chat), Renderer(family(name)).render(given_chat)), chat


def test_a_text_that_is_not_made_of_known_parts_is_not_guessed_at(family, counted):
    warm = Renderer(family("thinking"))
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "<think>\nx\n</think>\n\nhello"}]
    warm.render(chat)
    counted.clear()
    later = [*chat, {"role": "user", "content": "and now?"}]  # the template drops the thinking now
    assert same(warm.render(later), Renderer(family("thinking")).render(later))
    assert 3 in counted


@pytest.mark.parametrize("name", ["chatml", "openers", "thinking"])
def test_replies_are_spliced_as_with_marks(family, name):
    tokenizer = family(name)
    ids = [
        part
        for text in ("mad", "rid, said ", "the tool")
        for part in tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    chat = [{"role": "user", "content": "spain?"}, {"role": "assistant", "content": "madrid, said the tool"}]
    warm, spliced = Renderer(tokenizer), 0
    for turn in range(3):
        chat = [*chat, {"role": "user", "content": f"and then {turn}?"}, {"role": "assistant", "content": "hello"}]
        found = warm.render([*chat, {"role": "user", "content": "now?"}], generated=[ids])
        assert same(found, Renderer(tokenizer).render([*chat, {"role": "user", "content": "now?"}], generated=[ids]))
        spliced += found.spliced_tokens
    assert spliced
