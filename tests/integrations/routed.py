"""A chat model without an engine: it routes like the real one and says what its script says."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from pydantic import Field

from agentcache.integrations.routing import Route
from agentcache.reply import Reply

__all__ = ["RoutedModel", "tool_calls"]

_NUMBERS = itertools.count(1)


def tool_calls(*ids: str, name: str = "look") -> AIMessage:
    """A reply that calls a tool once for each id."""
    calls = [{"name": name, "args": {"q": i}, "id": i, "type": "tool_call"} for i in ids]
    return AIMessage(content="", tool_calls=calls)


class RoutedModel(BaseChatModel):
    """Says the next of `script` (text, or a message), then "done"; `calls` are its calls, each a route and its prompt."""

    router: Any
    script: list[Any] = Field(default_factory=list)
    calls: list[Any] = Field(default_factory=list)
    together: Any = None  # a barrier: all its calls wait for each other

    @property
    def _llm_type(self) -> str:
        return "routed"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Runnable[Any, Any]:
        return self.bind(**{key: value for key, value in kwargs.items() if key in ("episode", "parent")})

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        given = {key: kwargs[key] for key in ("episode", "parent") if key in kwargs}
        route: Route = self.router.route(messages, run_manager.metadata, run_manager.run_id, **given)
        self.calls.append(route)
        if self.together is not None:
            self.together.wait(10)
        said = self.script.pop(0) if self.script else f"done {threading.get_ident()}"
        if isinstance(said, Exception):
            self.router.failed(route, said)
            raise said
        message = said.model_copy(deep=True) if isinstance(said, AIMessage) else AIMessage(content=said)
        message.response_metadata["agentcache"] = {"episode": route.episode}
        reply = Reply(str(message.content), [1], "stop", 10, 0, 1.0, version=f"v{next(_NUMBERS)}")
        self.router.finished(route, reply, message, run_manager)
        return ChatResult(generations=[ChatGeneration(message=message)])
