"""What a call may say besides its messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentcache.errors import ConfigError
from agentcache.integrations.langchain.forms import Wanted
from agentcache.integrations.langchain.tools import choose, rendered
from agentcache.request import GenerateOptions

__all__ = ["EPISODE_ONLY", "merged", "take_wanted"]

EPISODE_ONLY: Final = frozenset({"policy", "policy_options", "sources", "save", "precision", "parent", "attributes"})
"""Options that mean nothing outside of an episode."""

_OWN: Final = frozenset({"tools", "attributes", "parent"})
_KNOWN: Final = frozenset(GenerateOptions.__annotations__) - _OWN
_EMPTY: Final[tuple[Any, ...]] = (None, {}, [])


def take_wanted(kwargs: dict[str, Any], *, parallel: bool) -> Wanted:
    """Returns what a call's keyword arguments ask of the reply's form, and removes them.

    Args:
        kwargs: The call's, with tools as `bind_tools` formats them.
        parallel: Whether several tool calls may stand in a reply when the call does not say.
    """
    tools = kwargs.pop("tools", None) or ()
    choice = kwargs.pop("tool_choice", None)
    said = kwargs.pop("parallel_tool_calls", None)
    return Wanted(
        tools=tools,
        choice=choose(choice, tools) if tools else "auto",
        parallel=parallel if said is None else bool(said),
        response_format=kwargs.pop("response_format", None),
    )


def merged(
    own: Mapping[str, Any],
    routed: Mapping[str, Any],
    said: Mapping[str, Any],
    wanted: Wanted,
    sampling: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the options of a request: what the call says comes first, then what its node asks for, then the model's own.

    Args:
        own: The model's.
        routed: Those of the middleware or node wrapper around the call.
        said: The call's.
        wanted: The form of its reply.
        sampling: What the parser needs of vLLM's `SamplingParams`.

    Raises:
        ConfigError: An option is unknown, or is given in two ways.
    """
    for name in said:
        if name not in _KNOWN:
            raise ConfigError(
                f"unknown argument {name}={said[name]!r:.80} of a call; there are {', '.join(sorted(_KNOWN))}, tools, tool_choice, "
                "parallel_tool_calls, response_format, episode and parent"
            )
    options: dict[str, Any] = {}
    for layer in (own, routed, said):
        if layer.get("policy") is not None:
            options.pop("policy_options", None)  # they are those of another policy
        options |= layer
    extra = dict(options.pop("extra", None) or {})
    for name in sampling:
        if name in extra and name != "skip_special_tokens":
            raise ConfigError(f"extra may not hold {name!r} beside tools or a response format, which set it")
    extra |= sampling
    if extra:
        options["extra"] = extra
    # A tool that may not be called is not shown either.
    if wanted.tools and wanted.choice != "none":
        options["tools"] = rendered(wanted.tools)
    return {name: value for name, value in options.items() if name == "max_tokens" or value not in _EMPTY}
