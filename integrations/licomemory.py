"""LiCoMemory (*LiCoMemory: Lightweight and Cognitive Agentic Memory*): what its query processor finds, as memory units.

Any object fits whose `await process_query(question, time)` returns a mapping with `triples`, `chunks` and `summaries`; its ready-made
prompt is not used: there the question comes first and each chunk begins with its rank, so that two prompts share nothing.

```
unit        text                        chunk of its own
summary     Session 3 (8 May): …        yes; its keys and themes, a line each
chunk       8 May Ann: I adopted …      yes; its rank is left out, or stands before it
triples     (Ann, adopted, Miso); …     no: a short list, seldom the same twice
```
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agentcache.errors import ConfigError
from agentcache.integrations.memory_units import MemoryUnit, UnitMemory
from agentcache.reply import Reply

__all__ = ["LiCoMemory", "LiCoProcessor", "result_units"]

_RANK = re.compile(r"^Chunk \d+:\s*")
_TEXT: Final = ("text", "content", "summary", "chunk")
_TIME: Final = ("time", "timestamp", "date", "session_time")
_SESSION: Final = ("session_id", "session", "id")
_TRIPLE: Final = (
    ("subject", "head", "src", "source"),
    ("relation", "predicate", "rel"),
    ("object", "tail", "tgt", "target"),
)


class LiCoProcessor(Protocol):
    """What is needed of a `QueryProcessor`."""

    async def process_query(self, question: str, time: str, /) -> Mapping[str, Any]:
        """Returns what is known about a question: `triples`, `chunks` and `summaries`."""


def result_units(result: Mapping[str, Any], *, ranks: bool = False) -> list[MemoryUnit]:
    """Returns what `process_query` has found as units: summaries, chunks, and the triples as one.

    A chunk or a summary is a text, a mapping or an object with a text and perhaps a time; a triple is a sequence of three, a mapping,
    an object or a text. A summary may have `keys` and a `context` of themes instead of a text, as LiCoMemory's own have; one that
    LiCoMemory failed to write is left out.

    Args:
        result: Of `process_query`.
        ranks: Whether `Chunk 1:` stands before the best chunk, and so on, as in LiCoMemory's own prompt; outside of what is reused.

    Raises:
        ConfigError: A part is of no such form; names it.
    """
    units = [_summary(item) for item in _items(result, "summaries") if _get(item, "summary_status") != "failed"]
    for rank, item in enumerate(_items(result, "chunks"), 1):
        units.append(MemoryUnit(_chunk(item), label=f"Chunk {rank}:" if ranks else ""))
    triples = sorted({_triple(item) for item in _items(result, "triples")})
    if triples:
        units.append(MemoryUnit("; ".join(triples), key="triples", encoded=False))
    return units


def _items(result: Mapping[str, Any], name: str) -> Iterable[Any]:
    items = result.get(name)
    if items is None:
        return ()
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ConfigError(f"{name} of process_query's result is {items!r:.80}; it must be a list")
    return items


def _get(item: Any, name: str) -> Any:
    """Returns a field of a mapping or an object; None: it has none of that name."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _field(item: Any, names: Sequence[str]) -> str:
    """Returns the first of these fields that a mapping or an object has and that is not empty, or an empty text."""
    return next((str(value) for name in names if (value := _get(item, name)) not in (None, "")), "")


def _text(item: Any, what: str, themes: str = "") -> str:
    text = item if isinstance(item, str) else _field(item, _TEXT) or themes
    if not text.strip():
        form = f"it is a text, or has one of {', '.join(_TEXT)}"
        form += ", or a context with theme_1, summary_1 and so on" if what == "summary" else ""
        raise ConfigError(f"a {what} without a text: {item!r:.120}; {form}")
    return text.strip()


def _chunk(item: Any) -> str:
    text, time = _RANK.sub("", _text(item, "chunk")), "" if isinstance(item, str) else _field(item, _TIME)
    return f"{time} {text}" if time else text


def _themes(item: Any) -> str:
    """Returns a summary's keys and its themes by number, `title: summary`, a line each; empty: it has no such form."""
    keys, context = _get(item, "keys"), _get(item, "context")
    lines = [f"Keys: {keys}" if isinstance(keys, str) and keys else ""]
    if isinstance(context, Mapping):
        numbers = {name.partition("_")[2] for name in context if name.startswith(("theme_", "summary_"))}
        for number in sorted(numbers, key=lambda number: (len(number), number)):
            parts = (context.get(f"theme_{number}"), context.get(f"summary_{number}"))
            lines.append(": ".join(str(part) for part in parts if part))
    elif isinstance(context, str):
        lines.append(context.strip())
    return "\n".join(filter(None, lines))


def _summary(item: Any) -> MemoryUnit:
    text = _text(item, "summary", _themes(item))
    if isinstance(item, str):
        return MemoryUnit(text)
    session, time = _field(item, _SESSION), _field(item, _TIME)
    head = " ".join(filter(None, (f"Session {session}" if session else "", f"({time})" if time else "")))
    return MemoryUnit(f"{head}: {text}" if head else text, key=f"summary of {head}" if session else "")


def _triple(item: Any) -> str:
    if isinstance(item, str):
        return item.strip()
    if isinstance(item, Sequence) and len(item) == 3:
        parts = [str(part) for part in item]
    else:
        parts = [_field(item, names) for names in _TRIPLE]
    if not all(parts):
        raise ConfigError(f"{item!r:.120} is no triple: it has a subject, a relation and an object")
    return f"({', '.join(parts)})"


@dataclass(slots=True, kw_only=True)
class LiCoMemory(UnitMemory):
    """Questions to a model with what a LiCoMemory query processor finds.

    ```python
    memory = LiCoMemory(cache=cache, processor=processor, policy="epic", policy_options={"k": 8})
    reply = await memory.aask("What is Ann's cat called?", time="2023-05-08", episode="chat-1")
    ```

    Attributes:
        processor: A `QueryProcessor`.
        ranks: Whether ranks stand before chunks, see `result_units`.
    """

    processor: LiCoProcessor
    ranks: bool = False

    async def retrieve(self, question: str, time: str = "") -> list[MemoryUnit]:
        """Returns what the processor finds for a question."""
        return result_units(await self.processor.process_query(question, time), ranks=self.ranks)

    def ask(
        self, question: str, *, episode: str, time: str = "", history: Iterable[Mapping[str, Any]] = (), **options: Any
    ) -> Reply:
        """Returns the reply to a question with what the processor finds for it; not where an event loop runs.

        Args:
            question: Retrieves, and ends the prompt.
            episode: Id of the conversation.
            time: When it is asked, as the processor wants it.
            history: Its earlier turns, without memory.
            **options: As in `Episode.generate`.
        """
        units = asyncio.run(self.retrieve(question, time))
        reply: Reply = self.send(self.request(units, question, history), episode, **options)
        return reply

    async def aask(
        self, question: str, *, episode: str, time: str = "", history: Iterable[Mapping[str, Any]] = (), **options: Any
    ) -> Reply:
        """Returns the reply to a question on an `AsyncAgentCache`; see `ask`."""
        units = await self.retrieve(question, time)
        reply: Reply = await self.asend(await self.arequest(units, question, history), episode, **options)
        return reply
