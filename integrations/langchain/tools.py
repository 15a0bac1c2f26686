"""Tools, tool choices and response formats in the form that vLLM takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from agentcache.episodes import Renderer
from agentcache.errors import ConfigError, RenderError

__all__ = ["ToolLike", "choose", "format_tools", "is_forced", "rendered", "takes_several_calls"]

ToolLike: TypeAlias = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
_KEYS: Final = ("name", "description", "parameters", "strict")


def format_tools(tools: Sequence[ToolLike], strict: bool | None = None) -> list[dict[str, Any]]:
    """Returns tools as OpenAI's function schemas, their keys in one order.

    Args:
        tools: Functions, LangChain tools, pydantic classes, typed dicts or schemas.
        strict: Whether the arguments must follow the schema also where the call is the model's choice; None: as the tool says.

    Raises:
        ConfigError: A tool is no function.
    """
    return [_formatted(tool, strict) for tool in tools]


def rendered(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools as the prompt shows them: `strict` is the engine's, and must not change the prompt."""
    return [
        {"type": "function", "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in tools
    ]


def choose(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | dict[str, Any]:
    """Returns a tool choice as `auto`, `none`, `required`, or a dict that names a function.

    Args:
        choice: Also `any` and True (any tool must be called), the name of a tool, a dict that names one, and None and False
            (the model's choice).
        tools: Those that are bound.

    Raises:
        ConfigError: There is no such tool.
    """
    if choice is None or choice is False:
        return "auto"
    if choice is True or choice == "any":
        return "required"
    if choice in ("auto", "none", "required"):
        return str(choice)
    name = choice if isinstance(choice, str) else _chosen(choice)
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise ConfigError(
            f"tool_choice={choice!r} names none of the bound tools ({', '.join(names) or 'none'}); give one of their names, or "
            "'auto', 'any' or 'none'"
        )
    return {"type": "function", "function": {"name": name}}


def is_forced(choice: str | Mapping[str, Any]) -> bool:
    """Whether a tool choice, as `choose` returns it, leaves the model no way but a call."""
    return choice == "required" or not isinstance(choice, str)


def takes_several_calls(renderer: Renderer) -> bool:
    """Whether a conversation can go on after a reply of two tool calls; also where the chat template takes no tool call at all."""
    return _takes_calls(renderer, 2) or not _takes_calls(renderer, 1)


def _takes_calls(renderer: Renderer, count: int) -> bool:
    ids = [f"call0000{number}" for number in range(count)]
    calls = [{"id": i, "type": "function", "function": {"name": "look", "arguments": {}}} for i in ids]
    results = [{"role": "tool", "content": ".", "tool_call_id": i, "name": "look"} for i in ids]
    try:
        renderer.render(
            [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
        )
    except RenderError:
        return False
    return True


def _chosen(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function", choice)
    return function.get("name") if isinstance(function, Mapping) else None


def _formatted(tool: ToolLike, strict: bool | None) -> dict[str, Any]:
    made = convert_to_openai_tool(tool, strict=strict)
    if made.get("type") != "function" or not isinstance(made.get("function"), Mapping):
        raise ConfigError(f"{tool!r:.200} is no function that this process can call; bind functions, tools or schemas")
    function = made["function"]
    rest = {key: value for key, value in function.items() if key not in _KEYS}
    return {"type": "function", "function": {key: function[key] for key in _KEYS if key in function} | rest}
