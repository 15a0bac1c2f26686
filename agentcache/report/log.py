"""An event log, version by version."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from agentcache.engine.wire import Recovery
from agentcache.event_log import read_events
from agentcache.events import (
    Event,
    KVPaused,
    KVResumed,
    PolicyFellBack,
    PromptRevised,
    QualityChecked,
    ReplyEnded,
)

__all__ = ["Entry", "Pause", "entries_of", "read_log"]


@dataclass(frozen=True, slots=True)
class Pause:
    """What an episode waited for before a version.

    Attributes:
        key: What it was, e.g. a tool call id.
        reason: Free text.
        seconds: How long, as far as the log tells.
    """

    key: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """What a log tells of one version.

    Attributes:
        revised: How the prompt differs from its parent's.
        recovery: How its KV came to be; None when no reply came, or the log does not tell.
        ended: Its reply, when there was one and the log has it.
        pauses: What its episode waited for since the version before it.
        checks: The quality guard's results.
        falls: What runs exactly since this version.
    """

    revised: PromptRevised
    recovery: Recovery | None = None
    ended: ReplyEnded | None = None
    pauses: tuple[Pause, ...] = ()
    checks: tuple[QualityChecked, ...] = ()
    falls: tuple[PolicyFellBack, ...] = ()


@dataclass(slots=True)
class _Episode:
    """Its versions so far, and what it waits for."""

    newest: str | None = None
    waiting: dict[str, KVPaused] = field(default_factory=dict)
    over: list[Pause] = field(default_factory=list)

    def resume(self, key: str | None, time_s: float) -> None:
        for name in [*self.waiting] if key is None else [key]:
            if (paused := self.waiting.pop(name, None)) is not None:
                self.over.append(Pause(paused.key, paused.reason, max(time_s - paused.time_s, 0.0)))

    def take(self, time_s: float) -> tuple[Pause, ...]:
        """Returns what it has waited for until a new version, and forgets it."""
        self.resume(None, time_s)
        pauses, self.over = tuple(self.over), []
        return pauses


def read_log(path: str | os.PathLike[str]) -> list[Entry]:
    """Returns what a log tells of each version, in the order in which they were recorded.

    Raises:
        ConfigError: A line is not an event; names the line.
        OSError: The file cannot be read.
    """
    return entries_of(read_events(path))


def entries_of(events: Iterable[Event]) -> list[Entry]:
    """Returns what events tell of each version, in the order in which they were recorded."""
    entries: dict[str, Entry] = {}
    episodes: dict[str, _Episode] = {}
    for event in events:
        episode = episodes.setdefault(event.episode, _Episode())
        match event:
            case PromptRevised() if event.version in entries:
                # A later process has opened the episode again. What the first one told stays, and the pause goes on.
                episode.newest = event.version
            case PromptRevised():
                entries[event.version] = Entry(event, pauses=episode.take(event.time_s))
                episode.newest = event.version
            case ReplyEnded():
                if event.version in entries:
                    known = entries[event.version]
                    recovery = Recovery.model_validate(event.recovery)
                    entries[event.version] = replace(known, ended=event, recovery=recovery)
            case KVPaused():
                # A reply's end is a pause too, of the version itself; what follows it tells how long.
                episode.waiting[event.key] = event
            case KVResumed():
                if not event.recovery:
                    episode.resume(event.key, event.time_s)
                elif event.version in entries:
                    known = entries[event.version]
                    if known.recovery is None:
                        entries[event.version] = replace(known, recovery=Recovery.model_validate(event.recovery))
            case QualityChecked():
                if event.version in entries:
                    known = entries[event.version]
                    entries[event.version] = replace(known, checks=(*known.checks, event))
            case PolicyFellBack():
                if episode.newest is not None:
                    known = entries[episode.newest]
                    entries[episode.newest] = replace(known, falls=(*known.falls, event))
    return list(entries.values())
