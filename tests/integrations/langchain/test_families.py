"""Which parsers a model gets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from agentcache.integrations.langchain.families import FAMILIES, FENCED, choose_parsers, template_of

TEMPLATES = Path(__file__).parent.parent / "templates"


@pytest.mark.parametrize(
    ("template", "model_type", "tool", "reasoning"),
    [
        ("qwen2_5", "qwen2", "hermes_or_fenced", None),
        ("qwen3", "qwen3", "hermes", "qwen3"),
        ("qwen3_instruct_2507", "qwen3", "hermes", None),
        ("qwen3_6", "qwen3_5", "qwen3_coder", "qwen3"),
        ("glm4moe", "glm4_moe", "glm45", "glm45"),
        ("llama3_2", "llama", "llama3_json", None),
        ("deepseekv3", "deepseek_v3", "deepseek_v3", "deepseek_r1"),
        ("lfm2_2_5", "lfm2", "lfm2", None),
    ],
)
def test_real_templates(template: str, model_type: str, tool: str, reasoning: str | None) -> None:
    text = (TEMPLATES / f"{template}.jinja").read_text()
    assert choose_parsers(text, model_type, "a-model") == (tool, reasoning)


@pytest.mark.parametrize(
    ("template", "model_type", "name", "expected"),
    [
        ("<|im_start|>", "llama", "SmolLM2-135M-Instruct", ("hermes", None)),
        ("[TOOL_CALLS]", "mistral", "Mistral-7B-Instruct-v0.3", ("mistral", None)),
        ("[TOOL_CALLS] [THINK]", "mistral", "Magistral", ("mistral", "mistral")),
        ("<tool_call> <think>", "qwen2", "QwQ-32B", ("hermes", "deepseek_r1")),
        ("<think>", "llama", "a-model", (None, "deepseek_r1")),
        ("<tool_call>", "granitemoehybrid", "granite-4.0-tiny", ("granite4", None)),
        ("{{ messages }}", "llama", "Llama-2-7b-chat", (None, None)),
        ("", "", "", (None, None)),
    ],
)
def test_marks_of_a_template_and_parts_of_a_name(
    template: str, model_type: str, name: str, expected: tuple[str | None, str | None]
) -> None:
    assert choose_parsers(template, model_type, name) == expected


def test_vllm_has_every_parser_of_the_table_and_is_given_ours() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from agentcache.integrations.langchain.fenced import FencedToolParser, register

    register()
    register()
    assert ToolParserManager.get_tool_parser(FENCED) is FencedToolParser
    assert {f.tool for f in FAMILIES} - {None} <= set(ToolParserManager.list_registered())
    assert {f.reasoning for f in FAMILIES} - {None} <= set(ReasoningParserManager.list_registered())


@pytest.mark.parametrize(("template", "text"), [("a", "a"), ({"default": "a", "tool_use": "b"}, "a\nb"), (None, "")])
def test_all_templates_of_a_tokenizer_count(template: object, text: str) -> None:
    assert template_of(SimpleNamespace(chat_template=template)) == text
