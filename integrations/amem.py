"""A-Mem (*A-Mem: Agentic Memory for LLM Agents*): the notes that it retrieves, as memory units whose KV is reused.

Any `AgenticMemorySystem` fits that has `find_related_memories_raw(query, k)`: that of PyPI's `a-mem`, and those of the authors'
repositories. Its text, one note a line that begins with `talk start time:`, is taken as it is; tabs stand between a note's parts, or
nothing. Adding a note may rewrite the context and the tags of its neighbours: such a note is the same unit with another text, and it
alone is encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agentcache.errors import ConfigError
from agentcache.integrations.memory_units import MemoryUnit, UnitMemory
from agentcache.reply import Reply

__all__ = ["AMemMemory", "AMemSystem", "note_units"]

_NOTE = re.compile(r"^(?=talk start time:)", re.MULTILINE)
_EVOLVES = "memory context:"
"""What begins the part of a note that evolution rewrites."""


class AMemSystem(Protocol):
    """What is needed of an `AgenticMemorySystem`."""

    def find_related_memories_raw(self, query: str, k: int = 5) -> str | list[Any]:
        """Returns the notes nearest to a query, and those that they link to, one a line; an empty text or list: it has none."""


def note_units(raw: str | list[Any]) -> list[MemoryUnit]:
    """Returns the notes of `find_related_memories_raw`'s text; a note that comes twice, as a hit and as a link, comes once.

    Args:
        raw: The text, or the empty list that one of the repositories gives while it has no note.

    Raises:
        ConfigError: It is neither, or does not begin with a note.
    """
    if raw == []:
        return []
    if not isinstance(raw, str):
        raise ConfigError(f"find_related_memories_raw gave {raw!r:.60}; it must be a text, or an empty list")
    texts = [text.rstrip("\n") for text in _NOTE.split(raw) if text.strip()]
    if texts and not texts[0].startswith("talk start time:"):
        raise ConfigError(
            f"find_related_memories_raw gave {texts[0][:60]!r}: a note begins with 'talk start time:'. Pass the text of an A-Mem "
            "system, or make the units yourself: MemoryUnit(text, key=...)"
        )
    return [MemoryUnit(text, key=_key(text)) for text in dict.fromkeys(texts)]


def _key(text: str) -> str:
    """Returns what evolution leaves of a note: its time and content."""
    kept, tabs, _ = text.partition(f"\t{_EVOLVES}")
    return kept if tabs else text.partition(_EVOLVES)[0]


@dataclass(slots=True, kw_only=True)
class AMemMemory(UnitMemory):
    """Questions to a model with the notes of an A-Mem system.

    ```python
    memory = AMemMemory(cache=cache, system=system, policy="epic", policy_options={"k": 8})
    system.add_note("Speaker Ann says : I adopted a cat named Miso.", time="202305081356")
    reply = memory.ask("What is Ann's cat called?", episode="chat-1")
    ```

    Attributes:
        system: An `AgenticMemorySystem`; notes are added to it, as always.
        k: Notes that a question retrieves.
    """

    system: AMemSystem
    k: int = 10

    def retrieve(self, query: str) -> list[MemoryUnit]:
        """Returns the notes that the system retrieves for a query, as it ranks them."""
        return note_units(self.system.find_related_memories_raw(query, k=self.k))

    def ask(self, question: str, *, episode: str, history: Iterable[Mapping[str, Any]] = (), **options: Any) -> Reply:
        """Returns the reply to a question with the notes that the system retrieves for it.

        Args:
            question: Retrieves, and ends the prompt.
            episode: Id of the conversation.
            history: Its earlier turns, without notes.
            **options: As in `Episode.generate`.
        """
        reply: Reply = self.send(self.request(self.retrieve(question), question, history), episode, **options)
        return reply

    async def aask(
        self, question: str, *, episode: str, history: Iterable[Mapping[str, Any]] = (), **options: Any
    ) -> Reply:
        """Returns the reply to a question on an `AsyncAgentCache`; see `ask`. Retrieval itself blocks, as A-Mem's does."""
        request = await self.arequest(self.retrieve(question), question, history)
        reply: Reply = await self.asend(request, episode, **options)
        return reply
