"""`AgentCacheMiddleware`: what `create_agent` knows of an agent's tool calls, told to its episode."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ModelResponse, ToolCallRequest
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from langgraph.types import Command

from agentcache.cache import AgentCache
from agentcache.engine.embedded import AsyncAgentCache
from agentcache.errors import ConfigError
from agentcache.integrations.langgraph.nodes import calling, check_options, pause_last
from agentcache.integrations.langgraph.pauses import ToolPauses
from agentcache.integrations.routing import CallContext, Router

__all__ = ["AgentCacheMiddleware"]


class AgentCacheMiddleware(AgentMiddleware):
    """Pauses an agent's episode at its tool calls, hints that it goes on, and chooses the policy of its model calls.

    Put it last in the list: it then sees the request that the model gets.

    ```python
    agent = create_agent(ChatAgentCache(...), tools, middleware=[..., AgentCacheMiddleware(policy="edit_local")])
    ```

    The episode waits from the reply with tool calls to the next call of the main model; its key is the tool call's id, however
    often the tool's node runs. When the last tool runs, a resume hint brings the checkpoint up.

    Args:
        cache: Whose episodes tools belong to; None: that of the model, once it was called.
        unsupported_model_behavior: What to do with a model that is no `ChatAgentCache`: `ignore` and `warn` leave it alone, `raise`
            is a ConfigError.
        **options: `policy`, `policy_options`, `precision`, `save`, `sources`, `timeout` of each call of the agent's model. What
            `model_settings` or the model itself say comes before them.

    Raises:
        ConfigError: An option is unknown or not allowed.
    """

    def __init__(
        self,
        *,
        cache: AgentCache | AsyncAgentCache | None = None,
        unsupported_model_behavior: Literal["ignore", "warn", "raise"] = "warn",
        **options: Any,
    ) -> None:
        super().__init__()
        if unsupported_model_behavior not in ("ignore", "warn", "raise"):
            raise ConfigError(
                f"unsupported_model_behavior={unsupported_model_behavior!r}; there are ignore, warn and raise"
            )
        self.unsupported_model_behavior = unsupported_model_behavior
        self.options = check_options(options)
        self.tools: list[BaseTool] = []
        self._cache = weakref.ref(cache) if cache is not None else lambda: None
        self._pauses = ToolPauses()

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        """Returns the model's response; a reply with tool calls pauses the episode."""
        if not self._supports(request.model):
            return handler(request)
        with calling(CallContext(self.options)) as call:
            response = handler(request)
        self._replied(call, response)
        return response

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        """Returns the model's response; a reply with tool calls pauses the episode."""
        if not self._supports(request.model):
            return await handler(request)
        with calling(CallContext(self.options)) as call:
            response = await handler(request)
        self._replied(call, response)
        return response

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Returns the tool's result. `ToolNode(tools, wrap_tool_call=...)` takes this method, too."""
        cache = self._cache()
        if cache is None:
            return handler(request)
        with self._pauses.running(cache, request.tool_call, request.state):
            return handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Returns the tool's result. `ToolNode(tools, awrap_tool_call=...)` takes this method, too."""
        cache = self._cache()
        if cache is None:
            return await handler(request)
        with self._pauses.running(cache, request.tool_call, request.state):
            return await handler(request)

    def _replied(self, call: CallContext, response: ModelResponse) -> None:
        router = next((route.router for route in reversed(call.routes)), None)
        cache = router.cache if router is not None else None
        if cache is not None and self._cache() is None:
            self._cache = weakref.ref(cache)
        # A tool call that is the structured response runs no tool.
        if response.structured_response is None:
            pause_last(call)

    def _supports(self, model: Any) -> bool:
        while not isinstance(getattr(model, "router", None), Router) and hasattr(model, "bound"):
            model = model.bound
        if isinstance(getattr(model, "router", None), Router):
            return True
        text = (
            f"AgentCacheMiddleware only does something for ChatAgentCache, not for {type(model).__name__}; pass that, or "
            "unsupported_model_behavior='ignore'"
        )
        if self.unsupported_model_behavior == "raise":
            raise ConfigError(text)
        if self.unsupported_model_behavior == "warn":
            warnings.warn(text, stacklevel=3)
        return False
