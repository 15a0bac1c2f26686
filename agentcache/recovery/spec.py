"""A policy and its options as one word, for command lines: `cacheblend:share=0.15:check=2`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentcache.errors import ConfigError

__all__ = ["format_policy", "parse_policy"]


def parse_policy(spec: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the options of `name` or `name:option=value:…`; a value that is no JSON is a text.

    Raises:
        ConfigError: It has another form. Whether the policy and its options are known says `get_policy`.
    """
    name, *pairs = spec.split(":")
    options: dict[str, Any] = {}
    for pair in pairs:
        option, equals, text = pair.partition("=")
        if not equals or not option:
            raise ConfigError(f"policy {spec!r}: {pair!r} is no option; write name:option=value, e.g. edit_local:k=64")
        try:
            options[option] = json.loads(text)
        except json.JSONDecodeError:
            options[option] = text
    return name, options


def format_policy(name: str, options: Mapping[str, Any]) -> str:
    """Returns the word that `parse_policy` reads as this name and these options.

    Raises:
        ConfigError: A value has a colon.
    """
    pairs = [f"{option}={json.dumps(value)}" for option, value in options.items()]
    if any(":" in pair for pair in pairs):
        raise ConfigError(f"policy {name!r} with {dict(options)} is no single word: a colon ends an option")
    return ":".join([name, *pairs])
