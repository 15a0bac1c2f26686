"""Calls that a model writes as JSON in a fence, or bare."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.tools import tool

from agentcache.integrations.langchain.families import FENCED, ParserNames
from agentcache.integrations.langchain.forms import Parsed, Wanted
from agentcache.integrations.langchain.tools import choose, format_tools

Make = Callable[..., Any]


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@tool
def write(text: str) -> str:
    """Writes."""
    return text


TOOLS = format_tools([add, write])
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
WRITE = '{"name": "write", "arguments": {"text": "as in\\n```json\\n{}\\n```\\nor </tool_call> and <tool_call> here"}}'


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture
def parser(tokenizer: Any) -> Any:
    from agentcache.integrations.langchain.parsing import OutputParsers

    kind = SimpleNamespace(model_type="qwen2")
    parsers = OutputParsers(
        ParserNames(FENCED, None),
        tokenizer=tokenizer,
        model_config=SimpleNamespace(hf_overrides=None, hf_config=kind, hf_text_config=kind),
        prompt_end=lambda: list(tokenizer.encode("<|im_start|>assistant\n")),
        grammar_waits=False,
        grammar_backend="auto",
        model="a-model",
    )
    return parsers.of(Wanted(TOOLS, choose("auto", TOOLS)), [])


def calls(parsed: Sequence[Parsed]) -> list[tuple[str, Any]]:
    """Names and arguments of what came, in one piece or many."""
    found: dict[int, list[str]] = {}
    for part in (call for each in parsed for call in each.calls):
        name_and_arguments = found.setdefault(part.index, ["", ""])
        name_and_arguments[0] += part.name or ""
        name_and_arguments[1] += part.arguments
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


def stream(parser: Any, tokenizer: Any, text: str) -> list[Parsed]:
    """What a stream of a text's tokens gives, the last delta without text as an engine's may be."""
    ids, found, sent = tokenizer.encode(text), list[Parsed](), ""
    for at in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:at])
        found.append(parser.delta(whole.removeprefix(sent), [ids[at - 1]], finished=False))
        sent = whole
    return [*found, parser.delta("", [], finished=True)]


CALLS = {
    "a fence": (f"```json\n{ADD}\n```", "", ["add"]),
    "a fence without a word": (f"```\n{ADD}\n```", "", ["add"]),
    "a fence that is not closed": (f"```json\n{ADD}", "", ["add"]),
    "bare": (ADD, "", ["add"]),
    "bare, over lines": (json.dumps(json.loads(ADD), indent=2), "", ["add"]),
    "behind words": (f"I add them.\n```json\n{ADD}\n```", "I add them.\n", ["add"]),
    "two fences": (f"```json\n{ADD}\n```\n```json\n{WRITE}\n```", "", ["add", "write"]),
    "a list": (f"```json\n[{ADD}, {WRITE}]\n```", "", ["add", "write"]),
    "arguments first": ('{"arguments": {"a": 1, "b": 2}, "name": "add"}', "", ["add"]),
    "two in a fence": (f"```json\n{ADD}\n{WRITE}\n```", "", ["add", "write"]),
    "two bare ones": (f"{ADD}\n{WRITE}", "", ["add", "write"]),
    "bare, then in a fence": (f"{ADD}\n```json\n{WRITE}\n```", "", ["add", "write"]),
    "a fence that the next one ends": (f"```json\n{ADD}\n```json\n{WRITE}\n```", "", ["add", "write"]),
    "behind blanks": (f"\n  {ADD}", "", ["add"]),
    "behind other code": (f"```python\nx = 1\n```\nso:\n```json\n{ADD}\n```", "```python\nx = 1\n```\nso:\n", ["add"]),
    "a fence between tags": (f"<tool_call>\n```json\n{ADD}\n```\n</tool_call>", "", ["add"]),
    "with words behind": (f"```json\n{ADD}\n```\nThat is it.", "", ["add"]),
    "tags": (f"<tool_call>\n{ADD}\n</tool_call>", "", ["add"]),
    "a fence in an argument": (f"```json\n{WRITE}\n```", "", ["write"]),
}
TEXTS = {
    "another tool": ADD.replace('"add"', '"subtract"'),
    "no arguments": '{"name": "add"}',
    "arguments that are none": '{"name": "add", "arguments": 3}',
    "other JSON": 'Here:\n```json\n{"id": 3, "of": [1, 2]}\n```\nThat is all.',
    "no JSON": "```json\n{name: add}\n```\nThat is all.",
    "JSON that is cut": '```json\n{"name": "add", "argu',
    "a list with something else": f"[{ADD}, 3]",
    "other code": "```python\nprint({})\n```",
    "words": "Use `add` or ``write``",
    "bare behind words": f"The call is {ADD}",
    "a fence at the end": "```json\n",
    "a tool's description": '```json\n{"name": "add", "parameters": {"type": "object"}}\n```',
    "a name that is none": '```json\n{"name": {"type": "string"}, "arguments": {}}\n```',
    "a name that is a list": '{"name": ["add"], "arguments": {}}',
    "more keys": '{"type": "function", "name": "add", "arguments": {"a": 1, "b": 2}}',
    "a number too long": "[" + "1" * 5000,
    "too deep": "[" * 2000,
    "call behind other code": f"```python\nx = 1\n```\n{ADD}",
    "call behind code in a line": f"```x```\n{ADD}",
    "the beginning of a tag": "if a <",
    "blanks": " \n",
    "a list of words": "[as the first says]",
    "an object whose first key is no call's": '{"names": ["add"], "arguments": {}}',
}


@pytest.mark.parametrize(("text", "content", "names"), CALLS.values(), ids=CALLS)
def test_calls_are_read_wherever_they_stand(
    parser: Any, tokenizer: Any, text: str, content: str, names: list[str]
) -> None:
    whole = [parser.parse(text, tokenizer.encode(text))]
    known = dict(json.loads(call).values() for call in (ADD, WRITE))
    assert calls(whole) == [(name, known[name]) for name in names]
    assert whole[0].content == content


@pytest.mark.parametrize(("text", "content", "names"), CALLS.values(), ids=CALLS)
def test_a_stream_gives_the_same_calls(parser: Any, tokenizer: Any, text: str, content: str, names: list[str]) -> None:
    parts = stream(parser, tokenizer, text)
    known = dict(json.loads(call).values() for call in (ADD, WRITE))
    assert calls(parts) == [(name, known[name]) for name in names]
    assert "".join(part.content for part in parts) == content


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_no_call_is_text_and_nothing_of_it_is_lost(parser: Any, tokenizer: Any, text: str) -> None:
    assert parser.parse(text, tokenizer.encode(text)) == Parsed(text)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_stream_loses_nothing_either(parser: Any, tokenizer: Any, text: str) -> None:
    parts = stream(parser, tokenizer, text)
    assert "".join(part.content for part in parts) == text and not calls(parts)


@pytest.mark.parametrize("text", ["if a <", '```json\n{"name": "add", "argu', "words and ``"])
def test_a_reply_that_a_limit_cuts_is_not_cut_shorter(parser: Any, tokenizer: Any, text: str) -> None:
    assert parser.parse(text, tokenizer.encode(text), cut=True).content == text


def test_a_last_delta_with_text_ends_the_stream(parser: Any, tokenizer: Any) -> None:
    first, last = "Well:\n```json\n", ADD
    parts = [
        parser.delta(first, tokenizer.encode(first), finished=False),
        parser.delta(last, tokenizer.encode(last), finished=True),
    ]
    assert [name for name, _ in calls(parts)] == ["add"] and "".join(part.content for part in parts) == "Well:\n"


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"id": 3, "of": [1, 2, 3, 4, 5, 6]}\n```',
        "[as the first of the two documents says, in words]",
        "{that is a set, not an object, and it goes on}",
        '```json\n{"name": "my-app", "version": "1.0.0", "arguments": {}, "private": true}\n```',
        "[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13",
    ],
)
def test_what_cannot_become_a_call_is_streamed_as_it_comes(parser: Any, tokenizer: Any, text: str) -> None:
    parts = stream(parser, tokenizer, text)
    assert sum(bool(part.content) for part in parts) > 8
    assert "".join(part.content for part in parts) == text
