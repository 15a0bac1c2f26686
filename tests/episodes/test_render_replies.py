"""Replies keep the tokens that the model generated."""

import numpy as np
import pytest

from agentcache.episodes.diff import diff_tokens
from agentcache.episodes.render import Renderer

USER = {"role": "user", "content": "the capital of france?"}
NEXT = {"role": "user", "content": "and spain?"}


def spell(tokenizer, text):
    """Ids that decode to the text but are not its tokenisation: one per character."""
    ids = [i for character in text for i in tokenizer(character, add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(ids) == text
    assert ids != tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.fixture
def chatml(family):
    return family("chatml")


@pytest.mark.parametrize("ending", [[], ["<|im_end|>"], ["<|im_end|>", "<|im_end|>"]])
@pytest.mark.parametrize("name", ["chatml", "openers"])
def test_a_reply_keeps_its_ids_with_and_without_what_ended_it(family, name, ending):
    tokenizer = family(name)
    renderer = Renderer(tokenizer)
    first = renderer.render([USER])
    text = "paris is the capital"
    words = spell(tokenizer, ("\n<think></think>\n" if name == "openers" else "") + text)
    reply = words + tokenizer.convert_tokens_to_ids(ending if name == "chatml" else ["<|user|>"] * len(ending))
    second = renderer.render([USER, {"role": "assistant", "content": text}, NEXT], generated=[reply])
    assert second.token_ids.tolist()[: len(first.token_ids) + len(words)] == first.token_ids.tolist() + words
    assert second.spliced_tokens == len(words)
    assert tokenizer.decode(second.token_ids, skip_special_tokens=False) == second.text
    assert diff_tokens([*first.token_ids, *words], second.token_ids).is_append


def test_without_the_reply_the_text_is_tokenised_again(chatml):
    renderer = Renderer(chatml)
    words = spell(chatml, "paris is the capital")
    chat = [USER, {"role": "assistant", "content": "paris is the capital"}, NEXT]
    assert renderer.render(chat).spliced_tokens == 0
    assert renderer.render(chat).token_ids.tolist() != renderer.render(chat, generated=[words]).token_ids.tolist()


@pytest.mark.parametrize("content", ["paris is the capitol", "paris", "paris is the capital!", " paris is the capital"])
def test_a_reply_that_was_changed_is_not_spliced(chatml, content):
    chat = [USER, {"role": "assistant", "content": content}, NEXT]
    rendered = Renderer(chatml).render(chat, generated=[spell(chatml, "paris is the capital")])
    assert rendered.spliced_tokens == 0
    assert rendered.token_ids.tolist() == chatml(rendered.text, add_special_tokens=False)["input_ids"]


def test_a_users_words_never_take_the_ids_of_a_reply(chatml):
    chat = [{"role": "user", "content": "paris is the capital"}]
    assert Renderer(chatml).render(chat, generated=[spell(chatml, "paris is the capital")]).spliced_tokens == 0


def test_the_spans_around_a_spliced_reply_are_exact(chatml):
    words = spell(chatml, "paris is the capital")
    chat = [USER, {"role": "assistant", "content": "paris is the capital"}, NEXT]
    rendered = Renderer(chatml).render(chat, generated=[words])
    texts = [chatml.decode(rendered.token_ids[s.start : s.stop], skip_special_tokens=False) for s in rendered.spans]
    assert texts == [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat]


def test_many_replies_are_spliced_each_in_its_place(chatml):
    texts = ["hello world", "madrid, said", "paris"]
    chat = [m for text in texts for m in (USER, {"role": "assistant", "content": text})]
    rendered = Renderer(chatml).render([*chat, NEXT], generated=[spell(chatml, text) for text in texts])
    assert rendered.spliced_tokens == sum(map(len, texts))


def test_a_tool_call_keeps_its_ids_and_the_order_in_which_its_arguments_were_written(chatml):
    text = '<tool_call>\n{"name": "search", "arguments": {"q": "spain", "a": 1}}\n</tool_call>'
    words = spell(chatml, text)
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"a": 1, "q": "spain"}'}}
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "madrid"}]
    renderer = Renderer(chatml)
    assert '{"a": 1, "q": "spain"}' in renderer.render(chat).text
    kept = renderer.render(chat, generated=[words])
    assert text in kept.text
    assert kept.spliced_tokens == len(words)


def test_a_tool_call_that_is_not_json_keeps_the_order_of_its_arguments_too(family):
    tokenizer = family("openers")
    call = '<tool_call>search<arg>q=spain</arg><arg>deep={"z": 1, "b": 2}</arg><arg>a=</arg></tool_call>'
    arguments = {"a": "", "deep": '{"z": 1, "b": 2}', "q": "spain"}
    chat = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search", "arguments": arguments}}]},
        {"role": "tool", "content": "madrid"},
    ]
    words = spell(tokenizer, f"\n<think></think>\n{call}")
    assert Renderer(tokenizer).render(chat, generated=[words]).spliced_tokens == len(words)
    assert "<arg>deep=" in Renderer(tokenizer).render(chat).text.split("<arg>q=")[0]


def test_arguments_that_no_reply_shows_are_sorted(chatml):
    call = {"function": {"name": "search", "arguments": {"q": "x", "a": {"d": 1, "c": 2}}}}
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    replies = [spell(chatml, '{"name": "search", "arguments": {"q": "y", "a": {}}}'), spell(chatml, "search {" * 5)]
    assert '{"a": {"c": 2, "d": 1}, "q": "x"}' in Renderer(chatml).render(chat, generated=replies).text


def test_thinking_that_is_still_shown_is_spliced_and_dropped_thinking_is_not(family):
    tokenizer = family("thinking")
    renderer = Renderer(tokenizer)
    words = spell(tokenizer, "hello\n</think>\n\nparis")
    chat = [USER, {"role": "assistant", "content": "<think>\nhello\n</think>\n\nparis"}]
    shown = renderer.render([*chat, {"role": "tool", "content": "result"}], generated=[words])
    assert shown.spliced_tokens == len(words)
    assert renderer.render([*chat, NEXT], generated=[words]).spliced_tokens == 0


def test_content_after_a_generation_prompt_that_history_lacks_is_spliced(family):
    tokenizer = family("thinking")  # opens the turn with <think>; the history shows a reply without it
    words = spell(tokenizer, "paris is the capital")
    chat = [USER, {"role": "assistant", "content": "paris is the capital"}, NEXT]
    assert Renderer(tokenizer).render(chat, generated=[words]).spliced_tokens == len(words)


def test_without_a_token_to_cut_at_nothing_is_spliced(family):
    tokenizer = family("plain")
    chat = [USER, {"role": "assistant", "content": "paris"}, NEXT]
    rendered = Renderer(tokenizer).render(chat, generated=[spell(tokenizer, "paris")])
    assert rendered.spliced_tokens == 0
    assert rendered.token_ids.tolist() == tokenizer(rendered.text, add_special_tokens=False)["input_ids"]


def test_replies_of_special_tokens_alone_are_ignored(chatml):
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    rendered = Renderer(chatml).render([USER, {"role": "assistant", "content": ""}, NEXT], generated=[[end], []])
    assert rendered.spliced_tokens == 0


def test_a_real_models_reply_in_other_tokens_makes_the_next_turn_an_append(smollm2):
    renderer = Renderer(smollm2)
    first = renderer.render([USER])
    words = spell(smollm2, "Paris is the capital.\n\nIt lies on the Seine.")
    reply = np.array([*words, smollm2.eos_token_id], np.int32)
    chat = [USER, {"role": "assistant", "content": smollm2.decode(words)}, NEXT]
    second = renderer.render(chat, generated=[reply])
    assert diff_tokens(np.concatenate([first.token_ids, reply]), second.token_ids).is_append
