"""Which of vLLM's parsers reads a model's tool calls and its reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

__all__ = ["FAMILIES", "FENCED", "NONE", "Family", "ParserNames", "choose_parsers", "template_of"]

NONE: Final = "none"
"""The override that switches a parser off."""

FENCED: Final = "hermes_or_fenced"
"""Our parser beside vLLM's, see `fenced`."""


class ParserNames(NamedTuple):
    """Names of vLLM's parsers of tool calls and of reasoning; None: there is none."""

    tool: str | None
    reasoning: str | None


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table: what its parsers are, and how one knows it. All that is given must hold.

    Attributes:
        tool: vLLM's parser of its tool calls.
        reasoning: vLLM's parser of its reasoning.
        template: Texts that its chat template holds, all of them.
        types: `model_type` of its config, one of them.
        names: Parts of its name in lower case, one of them.
    """

    tool: str | None
    reasoning: str | None
    template: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def fits(self, template: str, model_type: str, name: str) -> bool:
        """Whether a model is one of the family."""
        return (
            all(text in template for text in self.template)
            and (not self.types or model_type in self.types)
            and (not self.names or any(part in name for part in self.names))
        )


FAMILIES: Final = (
    Family("step3p5", "step3p5", ("<function=",), types=("step3p5",)),
    Family("qwen3_coder", "nemotron_v3", ("<function=", "<think>"), names=("nemotron",)),
    Family("qwen3_coder", "qwen3", ("<function=", "<think>")),
    Family("qwen3_coder", None, ("<function=",)),
    Family("glm45", "glm45", ("<arg_key>", "<think>")),
    Family("glm45", None, ("<arg_key>",)),
    Family("deepseek_v3", "deepseek_r1", ("<｜tool▁calls▁begin｜>", "```json", "<think>")),
    Family("deepseek_v3", None, ("<｜tool▁calls▁begin｜>", "```json")),
    Family("deepseek_v31", "deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    Family("kimi_k2", "kimi_k2", ("<|tool_calls_section_begin|>", "<think>")),
    Family("kimi_k2", None, ("<|tool_calls_section_begin|>",)),
    Family("minimax_m2", "minimax_m2", ("<minimax:tool_call>",)),
    Family("seed_oss", "seed_oss", ("<seed:tool_call>",)),
    Family("mistral", "mistral", ("[TOOL_CALLS]", "[THINK]")),
    Family("mistral", None, ("[TOOL_CALLS]",)),
    Family("llama4_pythonic", None, ("<|python_start|>",)),
    Family("llama3_json", None, ("ipython",)),
    Family("lfm2", None, ("<|tool_call_start|>",)),
    Family("internlm", None, ("<|plugin|>",)),
    Family("apertus", None, ("<|tools_prefix|>",)),
    Family("olmo3", "olmo3", ("<function_calls>",)),
    Family("longcat", None, ("<longcat_tool_call>",)),
    Family("cohere_command3", "cohere_command3", ("<|START_ACTION|>",)),
    Family("phi4_mini_json", None, ("<|tool|>",)),
    Family("granite4", None, ("<tool_call>",), names=("granite-4", "granite4")),
    Family("granite", None, names=("granite-3", "granite3")),
    Family("hunyuan_a13b", "hunyuan_a13b", types=("hunyuan_v1_moe", "hunyuan_v1_dense")),
    Family("ernie45", "ernie45", types=("ernie4_5", "ernie4_5_moe")),
    Family("mimo", "mimo", types=("mimo", "mimo_v2_flash")),
    Family("xlam", None, names=("xlam",)),
    Family("hermes", "deepseek_r1", ("<tool_call>",), names=("qwq",)),
    Family("hermes", "qwen3", ("<tool_call>", "<think>")),
    Family(FENCED, None, ("<tool_call>",), types=("qwen2",)),
    Family("hermes", None, ("<tool_call>",)),
    Family(None, "deepseek_r1", ("<think>",)),
    # ChatML without a word on tools: what such models were taught of them is Hermes' form.
    Family("hermes", None, ("<|im_start|>",)),
)
"""The first row that fits counts. Markers of a form come before those that several forms share."""


def choose_parsers(template: str, model_type: str, name: str) -> ParserNames:
    """Returns the parsers of a model.

    Args:
        template: Its chat template.
        model_type: Of its config.
        name: Folder or hub id.
    """
    for family in FAMILIES:
        if family.fits(template, model_type, name.lower()):
            return ParserNames(family.tool, family.reasoning)
    return ParserNames(None, None)


def template_of(tokenizer: Any) -> str:
    """Returns all chat templates of a tokenizer as one text."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(str(text) for text in template.values())
    return template if isinstance(template, str) else ""
