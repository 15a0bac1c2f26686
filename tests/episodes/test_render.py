from datetime import datetime

import numpy as np
import pytest
from tokenizers import normalizers

from agentcache.episodes import messages as messages_module
from agentcache.episodes.messages import KnownMessages, normalise_messages
from agentcache.episodes.render import Renderer
from agentcache.errors import RenderError
from agentcache.types import BoundaryKind
from tests.episodes.families import TEMPLATES, make_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def test_real_template_and_tokenizer_give_the_ids_of_apply_chat_template(smollm2):
    chat = [
        {"role": "system", "content": "You are terse.\n"},
        {"role": "user", "content": "Grüße, 你好 🙂\n\n  two"},
        {"role": "assistant", "content": "Hi <|im_end|> there"},
        {"role": "user", "content": " \n"},
    ]
    rendered = Renderer(smollm2).render(chat)
    expected = smollm2.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert rendered.token_ids.tolist() == expected
    assert rendered.token_ids.dtype == np.int32
    assert not rendered.token_ids.flags.writeable


def test_the_generation_prompt_can_be_left_out(renderer):
    opened, closed = (renderer("chatml").render(HELLO, add_generation_prompt=g) for g in (True, False))
    assert opened.text == closed.text + "<|im_start|>assistant\n"
    assert closed.spans[-1].stop == len(closed.token_ids)


def test_only_new_pieces_are_tokenised(family):
    class Counting:
        def __init__(self, tokenizer):
            self._tokenizer, self.texts = tokenizer, []

        def __getattr__(self, name):
            return getattr(self._tokenizer, name)

        def __call__(self, texts, **kwargs):
            self.texts += texts
            return self._tokenizer(texts, **kwargs)

    tokenizer = Counting(family("chatml"))
    renderer = Renderer(tokenizer)
    chat = [{"role": "user", "content": f"hello {i}"} for i in range(20)]
    renderer.render(chat)
    tokenizer.texts.clear()
    renderer.render([*chat[:5], {"role": "user", "content": "new"}, *chat[6:]])
    assert tokenizer.texts == ["<|im_start|>user\nnew"]


def test_tools_in_any_order_render_alike(family):
    renderer = Renderer(family("thinking"))
    tools = [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
        for name in ("walk", "search", "add")
    ]
    texts = {renderer.render(HELLO, tools=order).text for order in (tools, tools[::-1], tools[1:] + tools[:1])}
    assert len(texts) == 1
    assert '"name": "add"' in texts.pop()


def test_functions_are_sorted_among_tools():
    template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )

    def look(place: str) -> str:
        """Looks around.

        Args:
            place: Where.
        """
        return place

    tools = [
        {"type": "function", "function": {"name": "walk"}},
        look,
        {"type": "function", "function": {"name": "add"}},
    ]
    assert Renderer(make_tokenizer(template)).render(HELLO, tools=tools).text == "add look walk hello"


@pytest.mark.parametrize("arguments", ['{"b": {"d": 1, "c": 2}, "a": "x"}', {"b": {"d": 1, "c": 2}, "a": "x"}])
def test_arguments_are_values_in_sorted_order(renderer, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    rendered = renderer("chatml").render([*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert '"arguments": {"a": "x", "b": {"c": 2, "d": 1}}' in rendered.text


def test_a_template_that_wants_text_arguments_and_no_content_gets_them(renderer):
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": {"q": "é"}}}
    rendered = renderer("strings").render([*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert '<|assistant|><|call|>search {"q": "é"}<|endcall|><|eos|>' in rendered.text


def test_broken_json_arguments_stay_as_the_model_wrote_them():
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": '}}
    (message,) = normalise_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message.values["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_text_blocks_are_flattened(renderer):
    blocks = [{"type": "text", "text": "hello"}, "world"]
    rendered = renderer("chatml").render([{"role": "user", "content": blocks}])
    assert "user\nhello\nworld<|im_end|>" in rendered.text


def test_the_hash_covers_what_is_said_and_nothing_else():
    def digest(**changes):
        return normalise_messages([{"role": "tool", "content": "x", "tool_call_id": "1", **changes}])[0].content_hash

    assert digest(id="a", tags=["t"]) == digest(id="b")
    assert len({digest(), digest(content="y"), digest(tool_call_id="2"), digest(role="user"), digest(name="n")}) == 5


def test_messages_are_left_as_they_were(renderer):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":2}'}}
    chat = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call], "id": "m"}]
    renderer("chatml").render(chat)
    assert chat[1] == {"role": "assistant", "content": None, "tool_calls": [call], "id": "m"}
    assert call["function"]["arguments"] == '{"b":1,"a":2}'


def test_the_date_of_a_template_can_be_pinned():
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %} {{ m.content }}{% endfor %}"
    rendered = Renderer(make_tokenizer(template)).render(HELLO, now=datetime(2024, 7, 26))
    assert rendered.text == "26 Jul 2024 hello"


def test_template_variables_are_passed_on():
    template = "{{ mood }}{% for m in messages %} {{ m.content }}{% endfor %}"
    assert Renderer(make_tokenizer(template), template_kwargs={"mood": "calm"}).render(HELLO).text == "calm hello"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "no messages"),
        ([{"content": "x"}], "role None"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}], "content that is not text"),
        ([{"role": "user", "content": 5}], "content that is not text"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "without a function name"),
    ],
)
def test_malformed_messages_are_refused(renderer, messages, problem):
    with pytest.raises(RenderError, match=problem):
        renderer("chatml").render(messages)


def test_a_template_that_refuses_says_what_to_do():
    refuse = "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    renderer = Renderer(make_tokenizer("{% for m in messages %}" + refuse + "x{% endfor %}"))
    with pytest.raises(RenderError, match=r"\(system, user\): no system role; change the messages as it asks"):
        renderer.render([{"role": "system", "content": "s"}, *HELLO])


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(RenderError, match="chat_template"):
        Renderer(make_tokenizer(None))


def test_a_slow_tokenizer_is_refused(family):
    class Slow:
        is_fast = False
        chat_template = TEMPLATES["chatml"]

        def apply_chat_template(self, *args, **kwargs):
            return family("chatml").apply_chat_template(*args, **kwargs)

    with pytest.raises(RenderError, match="no fast tokenizer"):
        Renderer(Slow())


def test_a_tokenizer_whose_pieces_are_not_its_whole_is_never_cut():
    tokenizer = make_tokenizer(TEMPLATES["chatml"], ["<|im_start|>", "<|im_end|>"], "<|im_end|>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("hello ")  # each piece would get one
    chat = [*HELLO, {"role": "assistant", "content": "world"}, *HELLO]
    rendered = Renderer(tokenizer).render(chat)
    assert rendered.token_ids.tolist() == tokenizer(rendered.text, add_special_tokens=False)["input_ids"]


PARAGRAPH = "the capital of france is paris and the capital of spain is madrid, said the tool result, " * 3


def documents(renderer, content, role="user"):
    rendered = renderer.render([*HELLO, {"role": role, "content": content}])
    tokens = rendered.token_ids
    return [(b, tokens[b.start : b.stop]) for b in rendered.boundaries if b.kind is BoundaryKind.DOCUMENT]


def test_headed_documents_are_boundaries_down_to_the_token(family, renderer):
    content = f"Read these.\n\nDocument 1: {PARAGRAPH}\nDocument 2: short\nDocument 3: {PARAGRAPH}\n\nWhich one?"
    found = documents(renderer("chatml"), content)
    texts = [family("chatml").decode(ids) for _, ids in found]
    assert [text.split(":")[0].strip() for text in texts] == ["Document 1", "Document 2", "Document 3"]
    assert "Which" not in texts[2]


def test_long_paragraphs_are_documents_and_short_ones_are_not(family, renderer):
    found = documents(renderer("chatml"), f"{PARAGRAPH}\n\nshort\n \n{PARAGRAPH} end", "tool")
    texts = [family("chatml").decode(ids).strip() for _, ids in found]
    assert texts == [PARAGRAPH.strip(), f"{PARAGRAPH} end"]


@pytest.mark.parametrize("content", ["hello", PARAGRAPH, f"{PARAGRAPH}\nDocument 1: alone"])
def test_one_paragraph_is_no_document(renderer, content):
    assert documents(renderer("chatml"), content) == []


def test_a_reply_holds_no_documents(renderer):
    assert documents(renderer("chatml"), f"{PARAGRAPH}\n\n{PARAGRAPH}", "assistant") == []


def test_boundaries_ascend_and_documents_lie_in_their_message(renderer):
    chat = [
        {"role": r, "content": f"{PARAGRAPH}\n\n{PARAGRAPH}"} for r in ("system", "user", "assistant", "tool", "user")
    ]
    rendered = renderer("chatml").render(chat)
    starts = [b.start for b in rendered.boundaries]
    assert starts == sorted(starts)
    outer = [b for b in rendered.boundaries if b.kind is not BoundaryKind.DOCUMENT]
    assert [(b.start, b.stop) for b in outer] == [(s.start, s.stop) for s in rendered.spans]
    inner = [b for b in rendered.boundaries if b.kind is BoundaryKind.DOCUMENT]
    assert len(inner) == 8
    assert all(any(o.start <= b.start < b.stop <= o.stop for o in outer) for b in inner)


def test_messages_that_are_known_are_few_whether_they_say_something_or_not(monkeypatch):
    monkeypatch.setattr(messages_module, "_KNOWN_CHARACTERS", 10_000)
    known = KnownMessages()
    chat = [{"role": "user", "content": "" if i % 2 else "hello", "name": f"n{i}"} for i in range(200)]
    assert normalise_messages(chat, known=known) == normalise_messages(chat) == normalise_messages(chat, known=known)
    assert 0 < len(known._known) < 30
