"""Tool calls as pauses: an episode waits for each, and goes on soon when the last of them runs."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolCall, ToolMessage
from langgraph.errors import GraphBubbleUp

from agentcache.cache import AgentCache
from agentcache.engine.embedded import AsyncAgentCache

__all__ = ["ToolPauses", "pause_at_tool_calls"]

_OPEN: Final = 4096  # replies whose tools have begun to end
_Calls = tuple[str, tuple[str, ...]]  # a reply: its episode, and the ids of its calls


def pause_at_tool_calls(cache: AgentCache | AsyncAgentCache, episode: str, message: BaseMessage | None) -> None:
    """Pauses an episode for each tool call of its reply; the key is the call's id."""
    for call in message.tool_calls if isinstance(message, AIMessage) else ():
        cache.episode(episode).pause(_key(call), reason=f"tool {call['name']}")


class ToolPauses:
    """Follows the tools of replies, which end in any order on any thread. Thread-safe.

    An episode gets its resume hint when all calls of a reply but one have an answer and the tool of that one runs. A tool that asks a
    human pauses the episode again, under the same key.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._replies: OrderedDict[_Calls, _Reply] = OrderedDict()

    @contextlib.contextmanager
    def running(self, cache: AgentCache | AsyncAgentCache, call: ToolCall, state: Any) -> Iterator[None]:
        """Follows one tool while it runs.

        Args:
            cache: The episode's.
            call: That the tool answers.
            state: Of the graph; its messages say which reply and which episode the call belongs to.
        """
        origin = _reply_of(call, state)
        if origin is None:
            yield
            return
        found, answered = origin
        key, episode = _key(call), cache.episode(found[0])
        self._hint(episode, self._began(found, key, answered))
        try:
            yield
        except GraphBubbleUp:
            self._stopped(found, key)
            episode.pause(key, reason="interrupt")
            raise
        except BaseException:
            self._ended(found, key)
            raise
        self._hint(episode, self._ended(found, key))

    def _hint(self, episode: Any, last: str | None) -> None:
        if last is not None:
            episode.resume_hint(last)

    def _began(self, reply: _Calls, key: str, answered: Set[str]) -> str | None:
        with self._lock:
            known = self._replies.setdefault(reply, _Reply())
            while len(self._replies) > _OPEN:
                self._replies.popitem(last=False)
            known.ended |= answered - {key}
            known.running.add(key)
            return known.last(reply[1])

    def _stopped(self, reply: _Calls, key: str) -> None:
        with self._lock:
            if reply in self._replies:
                self._replies[reply].running.discard(key)

    def _ended(self, reply: _Calls, key: str) -> str | None:
        with self._lock:
            known = self._replies.setdefault(reply, _Reply())
            known.running.discard(key)
            known.ended.add(key)
            if known.ended.issuperset(reply[1]):
                del self._replies[reply]
            return known.last(reply[1])


@dataclass(slots=True)
class _Reply:
    """The tool calls of one reply that run, and those that have ended."""

    running: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    def last(self, calls: Sequence[str]) -> str | None:
        """Returns the call that alone has not ended, if it runs."""
        left = [call for call in calls if call not in self.ended]
        return left[0] if len(left) == 1 and left[0] in self.running else None


def _key(call: ToolCall) -> str:
    key: str = call["id"] or call["name"]
    return key


def _reply_of(call: ToolCall, state: Any) -> tuple[_Calls, frozenset[str]] | None:
    """Returns the reply that made a call, and the ids of the calls that were answered since.

    The chat model leaves the reply's episode in its metadata. A human who rejects a call, or a tool that ran in an earlier step, has
    answered it.
    """
    answered: set[str] = set()
    for message in reversed(_messages(state)):
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
        elif isinstance(message, AIMessage) and any(known["id"] == call["id"] for known in message.tool_calls):
            episode = (message.response_metadata.get("agentcache") or {}).get("episode")
            if episode is None:
                return None
            return (episode, tuple(_key(known) for known in message.tool_calls)), frozenset(answered)
    return None


def _messages(state: Any) -> Sequence[AnyMessage]:
    if isinstance(state, list):
        return state
    found = state.get("messages") if isinstance(state, dict) else getattr(state, "messages", None)
    return found or []
