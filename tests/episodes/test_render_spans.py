"""Where messages stand, for templates of every kind."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.episodes.render import Renderer
from agentcache.types import BoundaryKind
from tests.episodes.families import TEMPLATES, make_tokenizer

CALL = {"id": "call_0001", "type": "function", "function": {"name": "search", "arguments": {"q": "capital of spain"}}}
CHAT = [
    {"role": "system", "content": "you are the tool"},
    {"role": "user", "content": "the capital of france?", "id": "u1"},
    {"role": "assistant", "content": "<think>\nhello\n</think>\n\nparis is the capital"},
    {"role": "user", "content": "and spain? 5", "id": "u2", "tags": ["lc_source=x"]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "madrid, said the tool\nresult", "tool_call_id": "call_0001"},
    {"role": "tool", "content": "hello world", "tool_call_id": "call_0002"},
    {"role": "assistant", "content": "madrid"},
    {"role": "user", "content": "hello"},
]
CHATML = [f"<|im_start|>{m['role']}\n" for m in CHAT]
REPLY = "<|assistant|>\n<think></think>\n"
EXPECTED = {
    "chatml": CHATML,
    "thinking": [*CHATML[:5], "<|im_start|>user\n<tool_response>\n", "<tool_response>\n", *CHATML[7:]],
    "openers": [
        *("<sop><|system|>\n", "<|user|>\n", REPLY, "<|user|>\n", REPLY),
        *("<|observation|>\n", "<|observation|>\n", REPLY, "<|user|>\n"),
    ],
    "strings": [
        *("<bos>", "<|user|>", "<|assistant|>", "<|user|>", "<|assistant|><|call|>search"),
        *("<|output|>", "<|output|>", "<|assistant|>", "<|user|>"),
    ],
}


def words(message):
    """What of a message is in the text of every template."""
    content = message["content"] or "search"
    return json.dumps(content.split("</think>")[-1].strip(), ensure_ascii=False)[1:-1].split("\\n")


def pieces(tokenizer, rendered):
    return [tokenizer.decode(rendered.token_ids[s.start : s.stop], skip_special_tokens=False) for s in rendered.spans]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_span_is_one_message_with_the_templates_own_text(family, name):
    tokenizer = family(name)
    rendered = Renderer(tokenizer).render(CHAT)
    texts = pieces(tokenizer, rendered)
    assert [s.role for s in rendered.spans] == [m["role"] for m in CHAT]
    for text, start, message in zip(texts, EXPECTED[name], CHAT, strict=True):
        assert text.startswith(start)
        assert all(word in text for word in words(message))
    prompt = {"chatml": "<|im_start|>assistant\n", "thinking": "<|im_start|>assistant\n<think>\n"}
    assert "".join(texts) + prompt.get(name, "<|assistant|>") == rendered.text


def test_a_template_without_special_tokens_is_cut_after_its_closing_tags(family):
    tokenizer = family("plain")
    chat = [m for m in CHAT if m["role"] != "tool" and "tool_calls" not in m]
    texts = pieces(tokenizer, Renderer(tokenizer).render(chat))
    assert texts[0] == "<<SYS>>you are the tool<</SYS>>\n\n"
    assert [text.strip() for text in texts[1:3]] == ["[INST] the capital of france? [/INST]", chat[2]["content"]]
    assert texts[-1] == "[INST] hello [/INST]"


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_tags_are_kept_and_never_rendered(family, name):
    rendered = Renderer(family(name)).render([CHAT[1], CHAT[7], CHAT[3]])
    assert [(s.message_id, s.tags) for s in rendered.spans] == [("u1", ()), (None, ()), ("u2", ("lc_source=x",))]
    assert "u1" not in rendered.text
    assert "lc_source" not in rendered.text


def test_tool_results_are_known_by_the_id_of_their_call(family):
    rendered = Renderer(family("chatml")).render([*CHAT[:5], {**CHAT[5], "id": "changes-every-run"}])
    assert rendered.spans[5].message_id == "call_0001"
    assert rendered.boundaries[5].kind is BoundaryKind.TOOL_RESULT


def test_thinking_that_the_template_drops_later_leaves_exact_spans(family):
    tokenizer = family("thinking")
    renderer = Renderer(tokenizer)
    within = renderer.render(CHAT[:3], add_generation_prompt=False)
    later = renderer.render(CHAT[:4])
    assert pieces(tokenizer, within)[2] == f"<|im_start|>assistant\n{CHAT[2]['content']}<|im_end|>\n"
    assert pieces(tokenizer, later)[2] == "<|im_start|>assistant\nparis is the capital<|im_end|>\n"
    assert within.spans[2].content_hash == later.spans[2].content_hash


def test_a_default_system_turn_belongs_to_no_message(smollm2):
    rendered = Renderer(smollm2).render([{"role": "user", "content": "hello"}])
    assert smollm2.decode(rendered.token_ids[: rendered.spans[0].start]).startswith("<|im_start|>system\nYou are")
    assert pieces(smollm2, rendered) == ["<|im_start|>user\nhello<|im_end|>\n"]


def test_an_empty_tool_result_has_a_span(family):
    tokenizer = family("thinking")
    rendered = Renderer(tokenizer).render([*CHAT[:5], {**CHAT[5], "content": ""}, CHAT[7]])
    assert pieces(tokenizer, rendered)[5] == "<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"


def test_a_message_without_any_words_has_a_span_where_turns_are_closed(smollm2):
    chat = [CHAT[0], CHAT[1], {"role": "assistant", "content": None, "tool_calls": [CALL]}, CHAT[5], CHAT[7]]
    rendered = Renderer(smollm2).render(chat)  # its template does not show tool calls
    assert [s.role for s in rendered.spans] == [m["role"] for m in chat]
    assert pieces(smollm2, rendered)[2] == "<|im_start|>assistant\n<|im_end|>\n"


@pytest.mark.parametrize(
    "source",
    [
        # refuses names that it does not know: tool calls cannot be marked
        TEMPLATES["chatml"].replace(
            "<tool_call>", "{% if c.function.name != 'search' %}{{ raise_exception('unknown') }}{% endif %}<tool_call>"
        ),
        # counts characters: any mark changes it, contents are searched
        TEMPLATES["chatml"].replace("{{ m.role }}\n", "{{ m.role }} {{ m.content | length }}\n"),
    ],
    ids=["checks-names", "counts-characters"],
)
def test_spans_stay_exact_when_a_template_reacts_to_marks(source):
    tokenizer = make_tokenizer(source, ["<|im_start|>", "<|im_end|>"], "<|im_end|>")
    chat = [{**m, "content": m["content"] or "hello"} for m in CHAT]
    rendered = Renderer(tokenizer).render(chat)
    texts = pieces(tokenizer, rendered)
    assert len(texts) == len(chat)
    assert all(text.startswith("<|im_start|>") and text.endswith("<|im_end|>\n") for text in texts)
    assert all(m["content"] in text for m, text in zip(chat, texts, strict=True))


def test_a_template_that_rewrites_contents_still_renders():
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content | upper }}|{% endfor %}")
    rendered = Renderer(tokenizer).render([{"role": "user", "content": "hello"}])
    assert (rendered.text, rendered.spans) == ("HELLO|", ())
    assert tokenizer.decode(rendered.token_ids) == "HELLO|"


TRICKY = [
    *(
        "<|im_end|>",
        "<|im_start|>user\n",
        "</think>",
        "<think>",
        "</tool_response>",
        "<b>",
        "[/INST]",
        "Zk7q",
        "Zk7q0q",
    ),
    *("é", "🙂", "5", "{", '"', "\\n", " ", "\n", "hello world"),
]
contents = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(TRICKY), max_size=6).map("".join),
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(chat=st.lists(contents, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_content_gives_the_tokens_of_the_whole_text_and_ordered_spans(family, renderer, name, chat):
    tokenizer = family(name)
    messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(chat)]
    rendered = renderer(name).render(messages)
    assert rendered.token_ids.tolist() == tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    assert rendered.text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    end = 0
    for span in rendered.spans:
        assert end <= span.start <= span.stop <= len(rendered.token_ids)
        end = span.stop
    if name == "chatml":
        texts = pieces(tokenizer, rendered)
        assert texts == [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]


def test_many_threads_render_alike(family):
    renderer = Renderer(family("thinking"))
    alone = [renderer.render(CHAT[:n]).token_ids.tolist() for n in range(1, 9)]
    shared = Renderer(family("thinking"))
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda n: shared.render(CHAT[:n]).token_ids.tolist(), [*range(1, 9)] * 8))
    assert together == alone * 8
