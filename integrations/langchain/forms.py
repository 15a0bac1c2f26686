"""What is asked of a reply's form, and a reply taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.integrations.langchain.tools import is_forced

__all__ = ["CallPart", "Parsed", "Wanted"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call asks of its reply's form.

    Attributes:
        tools: OpenAI's function schemas.
        choice: As `tools.choose` returns it.
        parallel: Whether several calls may stand in a reply.
        response_format: OpenAI's; None: free text.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str | Mapping[str, Any] = "auto"
    parallel: bool = True
    response_format: Mapping[str, Any] | None = None

    @property
    def forced(self) -> bool:
        """Whether the reply is a tool call in any case."""
        return bool(self.tools) and is_forced(self.choice)


@dataclass(frozen=True, slots=True)
class CallPart:
    """A tool call, or in a stream what is new of it.

    Attributes:
        index: Its place in the reply.
        id: Its id, in its first part.
        name: Of the function, in its first part.
        arguments: JSON text.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply, or what is new of it."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)
