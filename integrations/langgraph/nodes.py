"""`wrap_node`: a node of any `StateGraph` whose model calls ask for a policy and pause at their tool calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from agentcache.errors import ConfigError
from agentcache.integrations.langgraph.pauses import pause_at_tool_calls
from agentcache.integrations.routing import CallContext, current_call
from agentcache.request import RequestOptions

__all__ = ["calling", "check_options", "wrap_node"]

F = TypeVar("F", bound=Callable[..., Any])
_OFFERED = ("policy", "policy_options", "precision", "save", "sources", "timeout")


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are set.

    Raises:
        ConfigError: One is not offered here, or not allowed.
    """
    for name, value in options.items():
        if name not in _OFFERED:
            raise ConfigError(f"unknown option {name}={value!r}; there are {', '.join(_OFFERED)}")
    given = {name: value for name, value in options.items() if value is not None}
    RequestOptions.build(given)
    return given


@contextlib.contextmanager
def calling(call: CallContext) -> Iterator[CallContext]:
    """Makes a context that of the model calls inside."""
    token = current_call.set(call)
    try:
        yield call
    finally:
        current_call.reset(token)


def pause_last(call: CallContext) -> None:
    """Pauses the episode of the last call that has a reply, if that has tool calls."""
    route = next((route for route in reversed(call.routes) if route.message is not None), None)
    cache = route.router.cache if route is not None and route.router is not None else None
    if route is not None and route.episode is not None and cache is not None:
        pause_at_tool_calls(cache, route.episode, route.message)


def wrap_node(node: F, *, episode: str | None = None, **options: Any) -> F:
    """Returns a graph's node whose model calls take these options, and whose episode pauses at tool calls.

    What LangGraph injects by name (config, runtime, store, writer) still reaches the node. Options that a call gives itself come
    before these.

    ```python
    graph.add_node("research", wrap_node(research, policy="edit_local"))
    ```

    Args:
        node: A function, a coroutine function, or an object with such a `__call__`.
        episode: Id of the calls' episode; None: that of the thread and namespace.
        **options: `policy`, `policy_options`, `precision`, `save`, `sources`, `timeout`, as in `Episode.generate`.

    Raises:
        ConfigError: An option is unknown or not allowed, or the node is no function.
    """
    given = check_options(options)
    if not callable(node):
        raise ConfigError(
            f"wrap_node takes a function, got {type(node).__name__}; wrap the function that calls the model"
        )
    if inspect.iscoroutinefunction(node) or inspect.iscoroutinefunction(getattr(node, "__call__", None)):  # noqa: B004

        @functools.wraps(node)
        async def run(*args: Any, **kwargs: Any) -> Any:
            with calling(CallContext(given, episode)) as call:
                result = await node(*args, **kwargs)
            pause_last(call)
            return result

    else:

        @functools.wraps(node)
        def run(*args: Any, **kwargs: Any) -> Any:
            with calling(CallContext(given, episode)) as call:
                result = node(*args, **kwargs)
            pause_last(call)
            return result

    if not hasattr(node, "__name__"):
        run.__name__ = run.__qualname__ = type(node).__name__  # LangGraph names a node after it
    return cast("F", run)
