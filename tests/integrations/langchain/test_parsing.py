"""vLLM's parsers on what a model might write, with the real tokenizer and without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, message_chunk_to_message
from langchain_core.messages.ai import UsageMetadata, add_ai_message_chunks

from agentcache import ConfigError
from agentcache.integrations.langchain.families import ParserNames
from agentcache.integrations.langchain.forms import CallPart, Parsed, Wanted
from agentcache.integrations.langchain.results import ai_message, new_chunk
from agentcache.integrations.langchain.tools import choose, format_tools

Make = Callable[..., Any]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
USAGE = UsageMetadata(input_tokens=1, output_tokens=1, total_tokens=2)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def now() -> str:
    """Tells the time."""
    return ""


TOOLS = format_tools([add, now])


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    tokenizer.add_tokens(["<think>", "</think>"])  # as reasoning models have them
    return tokenizer


@pytest.fixture(scope="module")
def make(tokenizer: Any) -> Make:
    """Returns what makes the parsers of a model with SmolLM2's tokenizer."""

    def make(
        tool: str | None = "hermes",
        reasoning: str | None = None,
        prompt_end: str = "<|im_start|>assistant\n",
        waits: bool = False,
        model_type: str = "llama",
        backend: str = "auto",
    ) -> Any:
        from agentcache.integrations.langchain.parsing import OutputParsers

        kind = SimpleNamespace(model_type=model_type)
        return OutputParsers(
            ParserNames(tool, reasoning),
            tokenizer=tokenizer,
            model_config=SimpleNamespace(hf_overrides=None, hf_config=kind, hf_text_config=kind),
            prompt_end=lambda: list(tokenizer.encode(prompt_end)),
            grammar_waits=waits,
            grammar_backend=backend,
            model="a-model",
        )

    return make


def wanted(choice: Any = "auto", tools: Sequence[dict[str, Any]] = TOOLS, **more: Any) -> Wanted:
    return Wanted(tools, choose(choice, tools), **more)


def tags(parser: Any) -> dict[str, Any]:
    """The structural tag that a reply must follow."""
    found: dict[str, Any] = json.loads(parser.sampling["structured_outputs"].structural_tag)["format"]
    return found


# -- what a reply must look like ---------------------------------------------------------------------------------------


def test_a_call_without_tools_has_no_parser(make: Make) -> None:
    assert make().of(Wanted(), []) is None


def test_nothing_is_forced_that_the_caller_does_not_force(make: Make) -> None:
    for asked in (wanted(), wanted("none"), wanted("auto", format_tools([add], True), parallel=True)):
        structured = make().of(asked, []).sampling.get("structured_outputs")
        # Strict tools may constrain a call once the model has begun one.
        assert structured is None or json.loads(structured.structural_tag)["format"]["type"] == "triggered_tags"


def test_a_forced_call_is_one_of_the_tools_and_follows_its_schema(make: Make) -> None:
    form = tags(make().of(wanted("any"), []))
    assert form["at_least_one"] and not form["stop_after_first"]
    schemas = {tag["begin"].split('"')[3]: tag["content"]["json_schema"] for tag in form["tags"]}
    assert schemas == {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}


def test_a_named_call_is_of_that_tool_and_the_only_one(make: Make) -> None:
    form = tags(make().of(wanted("now"), []))
    assert {tag["begin"].split('"')[3] for tag in form["tags"]} == {"now"} and form["stop_after_first"]


def test_one_call_at_most_when_they_may_not_be_parallel(make: Make) -> None:
    assert tags(make().of(wanted("any", parallel=False), []))["stop_after_first"]


def test_a_tool_that_is_not_strict_leaves_its_arguments_free(make: Make) -> None:
    form = tags(make().of(wanted("any", format_tools([add], False)), []))
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [True, True]


def test_a_response_format_alone(make: Make) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = Wanted(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert tags(make().of(asked, []))["json_schema"] == schema
    assert tags(make(None).of(Wanted(response_format={"type": "json_object"}), []))["json_schema"] == {"type": "object"}


def test_whitespace_between_the_parts_of_json_is_bounded(make: Make) -> None:
    form = tags(make().of(wanted("any"), []))
    assert {tag["content"]["max_whitespace_cnt"] for tag in form["tags"]} == {1}
    asked = Wanted(response_format={"type": "json_object"})
    assert tags(make().of(asked, []))["max_whitespace_cnt"] == 1
    # Other back ends know no bound, and xgrammar does not know every schema.
    assert make(backend="guidance").of(asked, []).sampling["structured_outputs"].json_object
    unknown = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}}}
    asked = Wanted(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": unknown}})
    assert make().of(asked, []).sampling["structured_outputs"].json == unknown


def test_a_response_format_beside_tools_leaves_both_ways(make: Make) -> None:
    parsers = make()
    form = tags(parsers.of(wanted(response_format={"type": "json_object"}), []))
    assert form["type"] == "or" and [e["type"] for e in form["elements"]] == ["tags_with_separator", "json_schema"]
    assert parsers.combines and make(None).combines


def test_a_parser_that_cannot_combine_them_says_so(make: Make) -> None:
    parsers = make("pythonic")
    assert not parsers.combines
    with pytest.raises(ConfigError, match=r"'pythonic' cannot combine tools with response_format.*ToolStrategy"):
        parsers.of(wanted(response_format={"type": "json_object"}), [])


def test_a_parser_of_plain_json_forces_calls_too(make: Make) -> None:
    parser = make("pythonic").of(wanted("add"), [])
    assert tags(parser)["json_schema"] == TOOLS[0]["function"]["parameters"]
    assert parser.parse('{"a": 1, "b": 2}', []).calls[0].name == "add"


def test_a_parser_that_cannot_force_says_so(make: Make) -> None:
    with pytest.raises(ConfigError, match="'dots' cannot force a tool call"):
        make("dots").of(wanted("any"), [])


# -- errors ------------------------------------------------------------------------------------------------------------


def test_tools_on_a_model_without_a_known_parser(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"no parser is known for the tool calls of 'a-model'.*tool_parser=.*hermes"):
        make(None).of(wanted(), [])


@pytest.mark.parametrize(
    ("tool", "reasoning", "option"), [("nope", None, "tool_parser"), (None, "nope", "reasoning_parser")]
)
def test_an_unknown_parser(make: Make, tool: str | None, reasoning: str | None, option: str) -> None:
    with pytest.raises(ConfigError, match=f"no {option} 'nope'; there are .*qwen3.*'none'"):
        make(tool, reasoning)


def test_a_parser_of_another_tokenizer(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"do not fit 'a-model'.*tool call token.*'none'"):
        make("mistral").of(wanted(), [])


def test_none_switches_parsers_off(make: Make) -> None:
    assert make("none", "none").names == (None, None)


def test_a_broken_schema(make: Make) -> None:
    with pytest.raises(ConfigError, match="json_schema"):
        make().of(Wanted(response_format={"type": "json_schema"}), [])


# -- what a reply is ---------------------------------------------------------------------------------------------------

REPLIES = {
    "text": ("It is 3.", Parsed("It is 3.")),
    "call": (CALL, ("", "", [("add", {"a": 1, "b": 2})])),
    "two calls": (f"{CALL}\n{CALL}", ("", "", [("add", {"a": 1, "b": 2})] * 2)),
    "text and call": (f"Let me see.\n{CALL}", ("Let me see.\n", "", [("add", {"a": 1, "b": 2})])),
    "no arguments": (CALL.replace('{"a": 1, "b": 2}', "{}"), ("", "", [("add", {})])),
    "other scripts": (CALL.replace("1", '"你好"'), ("", "", [("add", {"a": "你好", "b": 2})])),
}


def streamed(parser: Any, tokenizer: Any, text: str) -> Any:
    """The message that a stream of single tokens gives."""
    ids = tokenizer.encode(text)
    chunks: list[AIMessageChunk] = []
    told = ""
    for at, token in enumerate(ids, 1):
        known = tokenizer.decode(ids[:at])
        known = told if known.endswith("\ufffd") else known
        part = parser.delta(known[len(told) :], [token], finished=at == len(ids))
        told = known
        if part:
            chunks.append(new_chunk(part).message)
    return message_chunk_to_message(add_ai_message_chunks(chunks[0], *chunks[1:]))


def seen(message: Any) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    thoughts = message.additional_kwargs.get("reasoning_content", "")
    return message.content, thoughts, [(call["name"], call["args"]) for call in message.tool_calls]


@pytest.mark.parametrize("name", REPLIES)
def test_a_whole_reply_and_its_stream_are_the_same_message(make: Make, tokenizer: Any, name: str) -> None:
    text, expected = REPLIES[name]
    if isinstance(expected, Parsed):
        expected = (expected.content, "", [])
    parsers = make()
    whole = ai_message(parsers.of(wanted(), []).parse(text, tokenizer.encode(text)), USAGE, {})
    assert seen(whole) == expected
    assert seen(streamed(parsers.of(wanted(), []), tokenizer, text)) == expected
    assert all(call["id"] for call in whole.tool_calls)


def test_of_calls_that_may_not_be_parallel_the_first_counts(make: Make, tokenizer: Any) -> None:
    text = f"Let me see.\n{CALL}\n{CALL.replace('1', '7')}"
    expected = ("Let me see.\n", "", [("add", {"a": 1, "b": 2})])
    parsers, ids = make(), tokenizer.encode(text)
    for cut in (False, True):
        parsed = parsers.of(wanted(parallel=False), []).parse(text, ids, cut=cut)
        assert seen(ai_message(parsed, USAGE, {})) == expected
    assert seen(streamed(parsers.of(wanted(parallel=False), []), tokenizer, text)) == expected


def test_reasoning_stands_apart(make: Make, tokenizer: Any) -> None:
    parsers, text = make(reasoning="deepseek_r1"), f"<think>Hm, 1 and 2.</think>So.{CALL}"
    ids = tokenizer.encode(text)
    parser, expected = parsers.of(wanted(), []), ("So.", "Hm, 1 and 2.", [("add", {"a": 1, "b": 2})])
    assert seen(ai_message(parser.parse(text, ids), USAGE, {})) == expected
    assert 0 < parser.reasoning_tokens < len(ids)
    assert seen(streamed(parsers.of(wanted(), []), tokenizer, text)) == expected


def test_a_grammar_from_the_first_token_leaves_no_reasoning(make: Make) -> None:
    forced = make(reasoning="qwen3").of(wanted("any"), [])
    assert forced.reasoning_tokens is None and forced.parse(CALL, []).calls[0].name == "add"
    assert make(reasoning="qwen3", waits=True).of(wanted("any"), []).reasoning_tokens == 0


def test_a_template_that_closes_the_reasoning_leaves_content(make: Make, tokenizer: Any) -> None:
    open_, closed = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert make(reasoning="qwen3", prompt_end=open_).of(wanted(), []).reasoning_tokens == 0
    assert make(reasoning="qwen3", prompt_end=closed).of(wanted(), []).parse("So.", []).content == "So."


def test_arguments_that_are_no_object_are_an_invalid_call() -> None:
    parts = (CallPart(0, "c1", "add", "[1, 2"), CallPart(1, "c2", "add", "7"), CallPart(2, "c3", "now", ""))
    message = ai_message(Parsed(calls=parts), USAGE, {})
    assert [call["name"] for call in message.tool_calls] == ["now"]
    assert [(c["args"], c["error"]) for c in message.invalid_tool_calls] == [
        ("[1, 2", "the arguments are no JSON object"),
        ("7", "the arguments are no JSON object"),
    ]


@pytest.mark.parametrize("stop", range(len("<tool_call>"), len(CALL) - len("}}\n</tool_call>")))
@pytest.mark.parametrize("reasoning", [None, "deepseek_r1"])
def test_a_forced_call_that_a_limit_cuts_is_invalid_and_says_so(
    make: Make, tokenizer: Any, caplog: pytest.LogCaptureFixture, stop: int, reasoning: str | None
) -> None:
    text = CALL[:stop]
    parsed = make(reasoning=reasoning).of(wanted("any"), []).parse(text, tokenizer.encode(text), cut=True)
    message = ai_message(parsed, USAGE, {}, cut_at=12)
    assert message.tool_calls == [] and caplog.records == []
    assert [call["error"] for call in message.invalid_tool_calls] == ["cut by max_tokens=12"]


@pytest.mark.parametrize("tool", ["hermes", "qwen3_coder", "glm45", "pythonic"])
@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek_r1"])
def test_a_text_that_a_limit_cuts_is_the_text(make: Make, tokenizer: Any, tool: str, reasoning: str | None) -> None:
    text = "<think>Hm.</think>The sum of 1 and 2 is" if reasoning else "The sum of 1 and 2 is"
    parser = make(tool, reasoning).of(wanted(), [])
    parsed = parser.parse(text, tokenizer.encode(text), cut=True)
    assert parsed == Parsed("The sum of 1 and 2 is", "Hm." if reasoning else "")


def test_calls_before_the_one_that_is_cut_count(make: Make, tokenizer: Any) -> None:
    text = f"{CALL}\n{CALL[:50]}"
    parsed = make().of(wanted(), []).parse(text, tokenizer.encode(text), cut=True)
    message = ai_message(parsed, USAGE, {}, cut_at=30)
    assert [call["args"] for call in message.tool_calls] == [{"a": 1, "b": 2}]
    assert len(message.invalid_tool_calls) == 1


def test_kimis_ids_count_the_calls_of_the_history(make: Make) -> None:
    history = [{"role": "assistant", "tool_calls": [{"id": "functions.add:0", "function": {"name": "add"}}]}]
    parser = make("pythonic", model_type="kimi_k2").of(wanted("add"), history)
    assert parser.parse('{"a": 1, "b": 2}', []).calls[0].id == "functions.add:1"
