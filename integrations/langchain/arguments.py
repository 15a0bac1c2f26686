"""The constructor's arguments: a cache that runs, or the settings of one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Final

from agentcache.cache import AgentCache
from agentcache.config import CacheConfig
from agentcache.engine.embedded import AsyncAgentCache
from agentcache.errors import ConfigError

__all__ = ["check_running", "take_settings"]

_SETTINGS: Final = frozenset(CacheConfig.model_fields) - {"model", "policy", "policy_options", "seed", "profile"}
"""Settings of a cache that the constructor takes beside the model's own fields."""


def check_running(running: Any, given: Mapping[str, Any], fields: Collection[str]) -> None:
    """Checks the arguments beside a cache that runs.

    Args:
        running: The cache.
        given: All other arguments.
        fields: The model's own.

    Raises:
        ConfigError: It is no cache, or an argument is unknown or the cache's own.
    """
    if not isinstance(running, AgentCache | AsyncAgentCache):
        raise ConfigError(f"cache={running!r:.80} is no AgentCache, AsyncAgentCache, nor LangChain's cache of replies")
    for name, value in given.items():
        if name in _SETTINGS or (name == "settings" and value):
            raise ConfigError(f"{name}={value!r:.80} is a setting of the cache, which runs already; give it to that")
        _check_known(name, value, fields)
    if given.get("model", running.config.model) != running.config.model:
        raise ConfigError(f"model={given['model']!r}, but this cache runs {running.config.model!r}; leave it out")


def take_settings(given: dict[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Returns the settings of a cache among the arguments, and removes them.

    Args:
        given: The arguments.
        fields: The model's own.

    Raises:
        ConfigError: An argument is unknown.
    """
    found = dict(given.pop("settings", None) or {})
    for name in [name for name in given if name not in fields]:
        _check_known(name, given[name], {*fields, *_SETTINGS})
        found[name] = given.pop(name)
    return found


def _check_known(name: str, value: Any, known: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(sorted(known))}"
        raise ConfigError(f"unknown argument {name}={value!r:.80}; {hint}")
