"""What happens to episodes: typed events, and the bus that delivers them; `event_log` writes them down."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from agentcache.errors import ConfigError
from agentcache.types import AlignedRun, RevisionKind

__all__ = [
    "Event",
    "EventBus",
    "EventKind",
    "KVPaused",
    "KVResumed",
    "PolicyFellBack",
    "PromptRevised",
    "QualityChecked",
    "ReplyEnded",
    "Subscriber",
]

logger = logging.getLogger(__name__)

EventKind = Literal["prompt_revised", "reply_ended", "kv_paused", "kv_resumed", "quality_checked", "policy_fell_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRevised:
    """A version was recorded.

    Attributes:
        episode: The episode's id.
        version: The new version's id.
        parent: The version that it was compared with, if any.
        kind: Why it differs.
        prefix: |P| in tokens.
        aligned: The aligned spans, the prefix among them.
        old_len: Tokens of the parent, as computed.
        new_len: Tokens of the new prompt.
        labels: The new prompt's messages, each `role` or `role:id`.
        diff_ms: Time that the diff took.
        time_s: When, in seconds since the epoch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    episode: str
    version: str
    parent: str | None
    kind: RevisionKind
    prefix: int
    aligned: tuple[AlignedRun, ...]
    old_len: int
    new_len: int
    labels: tuple[str, ...] = ()
    diff_ms: float = 0.0
    time_s: float = field(default_factory=time.time)
    event: Literal["prompt_revised"] = "prompt_revised"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyEnded:
    """A version's request has ended with a reply; one that was aborted by its caller has none.

    Attributes:
        episode: The episode's id.
        version: The version's id.
        finish_reason: As in `Reply.finish_reason`.
        reply_tokens: Length of the reply.
        recovery: The fields of the request's `Recovery` report.
        spans: Where each message of `PromptRevised.labels` stands, `[start, stop)` in tokens.
        fresh_text: The text of each prompt token that no span of `PromptRevised.aligned` covers, ascending; None unless the cache
            has `events_text`.
        reply_text: The text of each token of the reply; None as above.
        time_s: When, in seconds since the epoch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    episode: str
    version: str
    finish_reason: str
    reply_tokens: int
    recovery: dict[str, Any] = field(default_factory=dict)
    spans: tuple[tuple[int, int], ...] = ()
    fresh_text: tuple[str, ...] | None = None
    reply_text: tuple[str, ...] | None = None
    time_s: float = field(default_factory=time.time)
    event: Literal["reply_ended"] = "reply_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPaused:
    """An episode waits (a tool runs, a human is asked) and its KV may leave the engine.

    Attributes:
        episode: The episode's id.
        key: What it waits for, e.g. a tool call id.
        version: The version whose KV is kept, when known.
        reason: Free text.
        time_s: When, in seconds since the epoch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    episode: str
    key: str
    version: str | None = None
    reason: str = ""
    time_s: float = field(default_factory=time.time)
    event: Literal["kv_paused"] = "kv_paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVResumed:
    """An episode goes on.

    Attributes:
        episode: The episode's id.
        key: What it had waited for; None resumes everything that the episode waits for.
        version: The version that its KV was recovered for.
        recovery: The fields of the request's `Recovery` report.
        time_s: When, in seconds since the epoch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    episode: str
    key: str | None = None
    version: str | None = None
    recovery: dict[str, Any] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)
    event: Literal["kv_resumed"] = "kv_resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityChecked:
    """The quality guard has compared a resume with its exact run.

    Attributes:
        episode: The episode's id.
        version: The version that was resumed.
        policy: The policy that was asked for.
        kl: Of the first token, exact to resumed, in nats; see `guard.top_kl`.
        top1_agrees: Whether both have the same most likely token.
        agreement: Share of the policy's last results whose most likely tokens agree, this one among them.
        strike: Whether it is beyond the bound.
        time_s: When, in seconds since the epoch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    episode: str
    version: str
    policy: str
    kl: float
    top1_agrees: bool
    agreement: float
    strike: bool
    time_s: float = field(default_factory=time.time)
    event: Literal["quality_checked"] = "quality_checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFellBack:
    """The quality guard has made an episode, or all requests of a policy, run exactly from now on.

    Attributes:
        scope: What runs exactly.
        episode: The episode, or the one that gave the policy the rest.
        policy: The policy that was asked for.
        reason: What was measured, the bound, and the way back.
        time_s: When, in seconds since the epoch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    scope: Literal["episode", "policy"]
    episode: str
    policy: str
    reason: str
    time_s: float = field(default_factory=time.time)
    event: Literal["policy_fell_back"] = "policy_fell_back"


Event = PromptRevised | ReplyEnded | KVPaused | KVResumed | QualityChecked | PolicyFellBack
Subscriber = Callable[[Event], Awaitable[None] | None]


class EventBus:
    """Delivers events to subscribers. Thread-safe.

    A subscriber that fails is logged and counted, and never disturbs the request that the event tells of. A second
    pause for the same (episode, key) is not delivered before that one is resumed: frameworks run a tool's node again
    after an interrupt.

    Attributes:
        failures: How many deliveries failed.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._lock = Lock()
        self._subscribers: dict[int, tuple[Subscriber, frozenset[str] | None, asyncio.AbstractEventLoop | None]] = {}
        self._next = 0
        self._paused: dict[str, set[str]] = {}
        self._running: set[asyncio.Task[None] | Future[None]] = set()

    def subscribe(self, subscriber: Subscriber, kinds: Iterable[EventKind] | None = None) -> Callable[[], None]:
        """Adds a subscriber and returns the function that removes it.

        Args:
            subscriber: A function, or a coroutine function. The latter runs on the loop that runs where the event is
                emitted, else on the loop that ran where it subscribed.
            kinds: Which events it gets; None: all.

        Raises:
            ConfigError: A kind does not exist.
        """
        wanted = None if kinds is None else frozenset[str](kinds)
        known = frozenset(EventKind.__args__)  # type: ignore[attr-defined]
        if wanted is not None and not wanted <= known:
            raise ConfigError(f"no event kinds {sorted(wanted - known)}; there are {sorted(known)}")
        with self._lock:
            ticket, self._next = self._next, self._next + 1
            self._subscribers[ticket] = (subscriber, wanted, _running_loop())

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers.pop(ticket, None)

        return unsubscribe

    def emit(self, event: Event) -> bool:
        """Delivers an event, functions now, coroutine functions on a loop; returns False for a repeated pause."""
        if not self._admit(event):
            return False
        for subscriber, home in self._for(event):
            rest = self._start(subscriber, event)
            if rest is None:
                continue
            loop = _running_loop()
            if loop is not None:
                self._keep(loop.create_task(self._guard(rest, event)))
            elif home is not None and home.is_running():
                self._keep(asyncio.run_coroutine_threadsafe(self._guard(rest, event), home))
            else:
                asyncio.run(self._guard(rest, event))  # no loop anywhere: nothing else would ever run it
        return True

    async def aemit(self, event: Event) -> bool:
        """Delivers an event, waits for coroutine functions, and returns False for a repeated pause."""
        if not self._admit(event):
            return False
        rests = [self._start(subscriber, event) for subscriber, _ in self._for(event)]
        await asyncio.gather(*(self._guard(rest, event) for rest in rests if rest is not None))
        return True

    def is_paused(self, episode: str, key: str) -> bool:
        """Whether an episode waits for a key."""
        with self._lock:
            return key in self._paused.get(episode, ())

    def forget(self, episode: str) -> None:
        """Removes what the episode waits for, without an event."""
        with self._lock:
            self._paused.pop(episode, None)

    def _admit(self, event: Event) -> bool:
        with self._lock:
            if isinstance(event, KVPaused):
                waiting = self._paused.setdefault(event.episode, set())
                known = event.key in waiting
                waiting.add(event.key)
                return not known
            if isinstance(event, KVResumed):
                waiting = self._paused.get(event.episode, set())
                waiting.clear() if event.key is None else waiting.discard(event.key)
                if not waiting:
                    self._paused.pop(event.episode, None)
            return True

    def _for(self, event: Event) -> list[tuple[Subscriber, asyncio.AbstractEventLoop | None]]:
        with self._lock:
            return [(s, home) for s, kinds, home in self._subscribers.values() if kinds is None or event.event in kinds]

    def _start(self, subscriber: Subscriber, event: Event) -> Awaitable[None] | None:
        """Calls a subscriber and returns what is still to be awaited, if anything."""
        try:
            result = subscriber(event)
        except Exception:
            logger.exception("an event subscriber failed on %s of episode %r", event.event, event.episode)
            self._count_failure()
            return None
        return result if inspect.isawaitable(result) else None

    async def _guard(self, rest: Awaitable[None], event: Event) -> None:
        try:
            await rest
        except Exception:
            logger.exception("an event subscriber failed on %s of episode %r", event.event, event.episode)
            self._count_failure()

    def _count_failure(self) -> None:
        with self._lock:
            self.failures += 1

    def _keep(self, task: asyncio.Task[None] | Future[None]) -> None:
        # The loop holds only weak references: without this one a task may vanish before it has run.
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
