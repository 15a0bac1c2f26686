"""Memory units: what a memory system retrieves, with texts, places and chunks that stay the same from query to query.

```
system | earlier turns | instruction · unit · unit · … · question
                                each unit's KV comes from a chunk of its text, wherever it stands
```
A unit is encoded once, when it is first seen, and reused in any later prompt: new position, new order, other query. Memory comes
late, so that what precedes it stays a common prefix; units stand in the order in which they were first seen, so that equal ones
of two queries in a row are moved as little as can be. No framework, no torch, no vLLM.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from agentcache.cache import AgentCache
from agentcache.engine.embedded import AsyncAgentCache
from agentcache.engine.wire import MOST_SOURCES
from agentcache.episodes.diff import MIN_SPAN
from agentcache.errors import ConfigError
from agentcache.recovery import get_policy
from agentcache.reply import Reply

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # `typing` has it from Python 3.13 on

__all__ = ["MemoryPrompt", "MemoryRequest", "MemoryUnit", "UnitChunks", "UnitMemory", "UnitOrder"]

Chat = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class MemoryUnit:
    """A piece of memory as it stands in prompts.

    Attributes:
        text: What is encoded and reused; it holds nothing that depends on the query: no rank, no score.
        key: What it is, across revisions of its text; empty: its text.
        label: Stands before the text and is computed with each prompt, e.g. a rank.
        encoded: Whether it gets a chunk; not for what is short, or seldom the same twice.
    """

    text: str
    key: str = ""
    label: str = ""
    encoded: bool = True

    @property
    def name(self) -> str:
        """Its key, or else its text."""
        return self.key or self.text


class MemoryRequest(NamedTuple):
    """What to send: `episode.generate(messages, sources=sources)`.

    Attributes:
        messages: The prompt.
        sources: Ids of the chunks of its units; none when the policy is exact, which takes nothing of them.
        units: In the order in which they stand in the prompt.
    """

    messages: Chat
    sources: list[str]
    units: tuple[MemoryUnit, ...]


@dataclass(frozen=True, slots=True)
class MemoryPrompt:
    """Where memory stands in a prompt.

    Attributes:
        system: The system message; None: there is none.
        instruction: Stands before the units.
        separator: Stands between instruction, units and question. Tokenizers do not join text across blank lines, so that a unit
            has the tokens in a prompt that it has alone.
        question_first: Whether the question comes before the units, as some systems have it. Units are reused all the same; a
            common prefix ends at the question.
    """

    system: str | None = None
    instruction: str = "Memories that may help:"
    separator: str = "\n\n"
    question_first: bool = False

    def render(self, units: Sequence[MemoryUnit], question: str, history: Iterable[Mapping[str, Any]] = ()) -> Chat:
        """Returns the messages of a prompt.

        Args:
            units: In their order.
            question: The last user message's own text.
            history: Earlier turns, without the memory that they had.
        """
        texts = [f"{unit.label}{self.separator}{unit.text}" if unit.label else unit.text for unit in units]
        memory = [self.instruction, *texts] if units else []
        parts = [question, *memory] if self.question_first else [*memory, question]
        begins = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*begins, *map(dict, history), {"role": "user", "content": self.separator.join(filter(None, parts))}]


class UnitOrder:
    """The order in which units were first seen. A unit keeps its place when its text is revised; texts of one key share a place."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def arrange(self, units: Iterable[MemoryUnit]) -> tuple[MemoryUnit, ...]:
        """Returns units in their order, each text once; those without a chunk come last, for they change the most."""
        once = list({unit.text: unit for unit in units}.values())
        for unit in once:
            self._places.setdefault(unit.name, len(self._places))
        return tuple(sorted(once, key=lambda unit: (not unit.encoded, self._places[unit.name], unit.text)))


class UnitChunks:
    """The chunks of memory units, a bounded number of them.

    A text is encoded when it is first seen. A unit whose text is revised drops its old chunk and gets a new one; all others stay
    as they are. Units of one key that come together are no revisions of each other: each keeps its chunk from then on. Beyond the
    bound, chunks that were not asked for the longest are dropped.

    Args:
        cache: Encodes them: an `AgentCache` for `take`, an `AsyncAgentCache` for `atake`.
        most: Most chunks that are kept.
        context: What units are encoded behind, e.g. the system message's text; None: what the tokenizer begins a text with.

    Attributes:
        encoded: Chunks that were made.
        reused: How often one was there already.
        dropped: Chunks that were dropped: revised ones, and those beyond the bound.

    Raises:
        ConfigError: `most` is smaller than what one prompt may need.
    """

    def __init__(self, cache: AgentCache | AsyncAgentCache, *, most: int = 1024, context: str | None = None) -> None:
        if most < MOST_SOURCES:
            raise ConfigError(
                f"most={most} chunks are too few: one prompt may need {MOST_SOURCES}; allow as many or more"
            )
        self.most, self.context = most, context
        self.encoded = self.reused = self.dropped = 0
        self._cache = cache
        self._lock, self._turn = Lock(), asyncio.Lock()
        self._chunks: OrderedDict[str, set[str]] = OrderedDict()  # names of units by chunk, the last used at the end
        self._of_unit: dict[str, str] = {}
        self._ambiguous: set[str] = set()  # keys that units with different texts had at once
        self._lengths: dict[str, int] = {}

    def take(self, units: Iterable[MemoryUnit]) -> list[str]:
        """Returns the ids of the units' chunks, and encodes those that are new.

        Units that are too short to be found in a prompt have none; of more than one request may name, the longest have one.

        Raises:
            ConfigError: The cache is asynchronous.
            AgentCacheError: The KV of a unit could not be kept.
        """
        if _is_async(self._cache):
            raise ConfigError("this cache is asynchronous: use atake, or the methods that begin with a")
        with self._lock:
            ids = [self._note(unit, self._cache.encode_chunk(unit.text, self.context)) for unit in self._worth(units)]
            for chunk in self._superfluous(ids):
                self._cache.drop_chunk(chunk)
        return list(dict.fromkeys(ids))

    async def atake(self, units: Iterable[MemoryUnit]) -> list[str]:
        """Returns the ids of the units' chunks, and encodes those that are new; see `take`."""
        if not _is_async(self._cache):
            raise ConfigError("this cache is synchronous: use take, or the methods without a leading a")
        async with self._turn:
            worth = self._worth(units)
            made = await asyncio.gather(*(self._cache.encode_chunk(unit.text, self.context) for unit in worth))
            ids = [self._note(unit, chunk) for unit, chunk in zip(worth, made, strict=True)]
            for chunk in self._superfluous(ids):
                await self._cache.drop_chunk(chunk)
        return list(dict.fromkeys(ids))

    def __len__(self) -> int:
        return len(self._chunks)

    def _worth(self, units: Iterable[MemoryUnit]) -> list[MemoryUnit]:
        """Returns the units that get a chunk, in their order."""
        found = [unit for unit in units if unit.encoded and self._length(unit.text) > MIN_SPAN]
        counts = Counter(name for name, _ in {(unit.name, unit.text) for unit in found})
        self._ambiguous |= {name for name, count in counts.items() if count > 1}
        longest = sorted(found, key=lambda unit: -self._length(unit.text))[:MOST_SOURCES]
        return [unit for unit in found if unit in longest]

    def _length(self, text: str) -> int:
        if text not in self._lengths:
            if len(self._lengths) >= 4 * self.most:
                self._lengths.clear()
            self._lengths[text] = len(self._cache.tokenizer.encode(text, add_special_tokens=False))
        return self._lengths[text]

    def _note(self, unit: MemoryUnit, chunk: str) -> str:
        """Counts a unit's chunk and returns it; another one that the unit had loses it."""
        if chunk in self._chunks:
            self.reused += 1
        else:
            self.encoded += 1
        name = unit.text if unit.name in self._ambiguous else unit.name
        self._chunks.setdefault(chunk, set()).add(name)
        self._chunks.move_to_end(chunk)
        before = self._of_unit.get(name, chunk)
        if before != chunk and before in self._chunks:
            self._chunks[before].discard(name)
        self._of_unit[name] = chunk
        return chunk

    def _superfluous(self, needed: Sequence[str]) -> list[str]:
        """Forgets and returns chunks that no unit has any more, and the oldest ones beyond the bound."""
        gone = [chunk for chunk, names in self._chunks.items() if not names and chunk not in needed]
        over = len(self._chunks) - len(gone) - self.most
        gone += [chunk for chunk, names in self._chunks.items() if names and chunk not in needed][: max(over, 0)]
        for chunk in gone:
            for name in self._chunks.pop(chunk):
                del self._of_unit[name]
        self.dropped += len(gone)
        return gone


@dataclass(slots=True)
class UnitMemory:
    """The common part of memory adapters: from retrieved units and a question to a request.

    Attributes:
        cache: Serves the requests: an `AgentCache`, or an `AsyncAgentCache` for the methods that begin with `a`.
        prompt: Where memory stands.
        policy: Recovery policy of the requests; None: the cache's. An exact one is served without chunks.
        policy_options: The policy's own settings.
        chunks: Those of the units; None: made with the defaults.
        order: Of the units.
    """

    cache: AgentCache | AsyncAgentCache
    prompt: MemoryPrompt = field(default_factory=MemoryPrompt)
    policy: str | None = None
    policy_options: dict[str, Any] | None = None
    chunks: UnitChunks | None = None
    order: UnitOrder = field(default_factory=UnitOrder)

    def request(
        self, units: Iterable[MemoryUnit], question: str, history: Iterable[Mapping[str, Any]] = ()
    ) -> MemoryRequest:
        """Returns the request of a question and the units that were retrieved for it; new ones are encoded now.

        Raises:
            AgentCacheError: The KV of a unit could not be kept.
        """
        arranged = self.order.arrange(units)
        sources = self._own_chunks().take(arranged) if self._reuses() else []
        return MemoryRequest(self.prompt.render(arranged, question, history), sources, arranged)

    async def arequest(
        self, units: Iterable[MemoryUnit], question: str, history: Iterable[Mapping[str, Any]] = ()
    ) -> MemoryRequest:
        """Returns the request of a question on an `AsyncAgentCache`; see `request`."""
        arranged = self.order.arrange(units)
        sources = await self._own_chunks().atake(arranged) if self._reuses() else []
        return MemoryRequest(self.prompt.render(arranged, question, history), sources, arranged)

    def send(self, request: MemoryRequest, episode: str, **options: Any) -> Reply:
        """Returns the reply to a request, which becomes a version of an episode; options as in `Episode.generate`."""
        if _is_async(self.cache):
            raise ConfigError("this cache is asynchronous: use asend")
        return self.cache.episode(episode).generate(request.messages, **self._options(request, options))

    async def asend(self, request: MemoryRequest, episode: str, **options: Any) -> Reply:
        """Returns the reply to a request on an `AsyncAgentCache`; see `send`."""
        if not _is_async(self.cache):
            raise ConfigError("this cache is synchronous: use send")
        return await self.cache.episode(episode).generate(request.messages, **self._options(request, options))

    def _own_chunks(self) -> UnitChunks:
        if self.chunks is None:
            self.chunks = UnitChunks(self.cache)
        return self.chunks

    def _reuses(self) -> bool:
        """Whether the policy takes anything of chunks."""
        config = self.cache.config
        policy = self.policy or config.policy
        given = self.policy_options
        own = given if given is not None else config.policy_options if policy == config.policy else {}
        return not get_policy(policy, config.options_for(policy, own)).exact

    def _options(self, request: MemoryRequest, options: dict[str, Any]) -> dict[str, Any]:
        own = {} if self.policy is None else {"policy": self.policy, "policy_options": self.policy_options}
        return {"sources": request.sources, **own, **options}


def _is_async(cache: AgentCache | AsyncAgentCache) -> TypeIs[AsyncAgentCache]:
    return inspect.iscoroutinefunction(cache.encode_chunk)
