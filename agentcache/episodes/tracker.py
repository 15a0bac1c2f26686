"""Episodes and their versions: what a prompt was, what it became, and why."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import RLock
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import numpy as np

from agentcache.episodes.anchors import pair_messages
from agentcache.episodes.buffers import Buffer
from agentcache.episodes.diff import TokenIds, as_ids, diff_tokens
from agentcache.episodes.kinds import classify
from agentcache.episodes.pieces import TokenArray
from agentcache.episodes.render import Rendered
from agentcache.errors import ConfigError, UnknownVersionError
from agentcache.events import EventBus, PromptRevised
from agentcache.types import Boundary, MessageSpan, PromptDiff, RevisionKind

__all__ = ["EpisodeTracker", "Revision", "Version"]


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """One rendered prompt of an episode, and the reply to it once there is one.

    Attributes:
        version_id: Unique among all episodes.
        episode: The episode that it was recorded in.
        parent: The version that it was compared with.
        kind: Why it differs from that.
        token_ids: The prompt, int32, read-only.
        generated: The reply, int32, read-only.
        computed: Of prompt and reply, how many tokens have KV; None: all.
        spans: The prompt's messages; empty for bare ids.
        boundaries: Its messages, tool results and documents.
        attributes: Whatever the caller keeps with it, e.g. a framework's checkpoint id.
        created_s: When, in seconds since the epoch.
    """

    version_id: str
    episode: str
    parent: str | None
    kind: RevisionKind
    token_ids: TokenArray
    generated: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    computed: int | None = None
    spans: tuple[MessageSpan, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    created_s: float = 0.0

    @property
    def context_ids(self) -> TokenArray:
        """Prompt and reply, as far as they were computed: the old side of the next diff."""
        whole = np.concatenate([self.token_ids, self.generated]) if len(self.generated) else self.token_ids
        return whole[: self.computed]


@dataclass(frozen=True, slots=True)
class Revision:
    """What recording a prompt has found out.

    Attributes:
        episode: The episode's id.
        version: The new version's id.
        parent: The version that it was compared with; None for a first one.
        kind: Why it differs.
        diff: From the parent's computed tokens to the new prompt.
        spans: The new prompt's messages.
        boundaries: Its messages, tool results and documents.
        diff_ms: Time of the diff.
    """

    episode: str
    version: str
    parent: str | None
    kind: RevisionKind
    diff: PromptDiff
    spans: tuple[MessageSpan, ...]
    boundaries: tuple[Boundary, ...]
    diff_ms: float


@dataclass(slots=True)
class _Episode:
    """Own versions in their order, the head, and for a fork the version that it began at."""

    head: str | None = None
    base: str | None = None
    versions: list[str] = field(default_factory=list)


class EpisodeTracker:
    """Keeps the versions of episodes in a DAG. Thread-safe; nothing is ever written to disk.

    A version stays as long as its episode, a child or a fork needs it. Ids are opaque: any text names an episode.

    Args:
        bus: Gets a `PromptRevised` for each version.
        new_id: Makes version ids; they must be globally unique.
        clock: Tells the time in seconds since the epoch.
    """

    def __init__(
        self,
        bus: EventBus | None = None,
        *,
        new_id: Callable[[], str] = lambda: uuid4().hex,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._new_id, self._clock = bus, new_id, clock
        self._lock = RLock()
        self._episodes: dict[str, _Episode] = {}
        self._versions: dict[str, Version] = {}
        self._uses: Counter[str] = Counter()  # by the own episode, children, and forks
        self._buffers: dict[str, Buffer] = {}

    def record(
        self,
        episode: str,
        prompt: Rendered | TokenIds,
        *,
        parent: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        version: str | None = None,
    ) -> Revision:
        """Adds a prompt to an episode, makes it the head, and returns how it differs from its parent.

        Args:
            episode: Its id; a new one begins a new episode.
            prompt: A rendering, or bare token ids.
            parent: The version to compare with; None: the episode's head.
            attributes: Kept with the version.
            version: Its id, which it had in an earlier process; None makes one.

        Raises:
            UnknownVersionError: There is no such parent. The tracker is unchanged.
            ConfigError: A version of this id is there already.
        """
        if version is not None and version in self._versions:
            raise ConfigError(f"version {version!r} is there already; a version is created once")
        if not isinstance(prompt, Rendered):
            prompt = Rendered(_token_ids(prompt), (), (), "")
        old = self.version(parent) if parent is not None else self.head(episode)
        began = time.perf_counter()
        diff, kind = _compare(old, prompt)
        diff_ms = 1e3 * (time.perf_counter() - began)
        made = Version(
            version_id=version or self._new_id(),
            episode=episode,
            parent=old.version_id if old else None,
            kind=kind,
            token_ids=prompt.token_ids,
            spans=_shared(prompt.spans, old.spans) if old else prompt.spans,
            boundaries=prompt.boundaries,
            attributes=MappingProxyType(dict(attributes or {})),
            created_s=self._clock(),
        )
        self._add(made)
        revision = Revision(episode, made.version_id, made.parent, kind, diff, made.spans, made.boundaries, diff_ms)
        if self._bus is not None:
            self._bus.emit(_event(revision, made.created_s))
        return revision

    def finish(self, version: str, generated: TokenIds, *, computed: int | None = None) -> Version:
        """Adds the reply to a version and returns it; the next diff is taken to prompt and reply.

        Args:
            version: Its id.
            generated: The reply's ids, whatever ended it.
            computed: Of prompt and reply, how many tokens have KV; None: all.

        Raises:
            UnknownVersionError: There is no such version.
            ConfigError: More tokens computed than there are.
        """
        reply = _token_ids(generated)
        with self._lock:
            known = self.version(version)
            whole = np.concatenate([known.token_ids, reply])
            if computed is not None and not 0 <= computed <= len(whole):
                raise ConfigError(f"computed={computed} of version {version}: it has {len(whole)} tokens")
            finished = replace(known, generated=reply, computed=computed)
            self._versions[version] = self._buffered(finished, self._buffers[version].extended(whole))
            return self._versions[version]

    def version(self, version: str) -> Version:
        """Returns a version.

        Raises:
            UnknownVersionError: There is none of this id.
        """
        with self._lock:
            found = self._versions.get(version)
        if found is None:
            raise UnknownVersionError(
                f"there is no version {version!r}; it was never recorded, or its episode was dropped"
            )
        return found

    def knows(self, version: str) -> bool:
        """Whether there is a version of this id."""
        return version in self._versions

    def head(self, episode: str) -> Version | None:
        """Returns the version that the next one is compared with, or None for an unknown or empty episode."""
        with self._lock:
            known = self._episodes.get(episode)
            return self._versions[known.head] if known and known.head else None

    def history(self, episode: str) -> tuple[Version, ...]:
        """Returns an episode's versions, oldest first; for a fork those that led to it come before its own.

        Raises:
            UnknownVersionError: There is no such episode.
        """
        with self._lock:
            known = self._episode(episode)
            inherited = self.lineage(known.base) if known.base else ()
            return (*inherited, *(self._versions[v] for v in known.versions))

    def lineage(self, version: str) -> tuple[Version, ...]:
        """Returns a version and its ancestors, oldest first.

        Raises:
            UnknownVersionError: There is no such version.
        """
        with self._lock:
            chain = [self.version(version)]
            while chain[-1].parent is not None:
                chain.append(self._versions[chain[-1].parent])
        return tuple(reversed(chain))

    def replies(self, version: str) -> tuple[TokenArray, ...]:
        """Returns the replies of a version and its ancestors, oldest first: what a renderer splices.

        Raises:
            UnknownVersionError: There is no such version.
        """
        return tuple(v.generated for v in self.lineage(version) if len(v.generated))

    def fork(self, episode: str, version: str, *, name: str | None = None) -> str:
        """Begins a new episode at a version of another one and returns its id.

        Args:
            episode: The episode that the version is in.
            version: Any of its history.
            name: Id of the new episode; None makes one.

        Raises:
            UnknownVersionError: The episode has no such version.
            ConfigError: An episode of this name is there already.
        """
        with self._lock:
            if version not in {v.version_id for v in self.history(episode)}:
                raise UnknownVersionError(
                    f"episode {episode!r} has no version {version!r}; `history` lists what it has"
                )
            fork = name if name is not None else f"{episode}/{self._new_id()}"
            if fork in self._episodes:
                raise ConfigError(f"there is an episode {fork!r} already; choose another name or drop that one")
            self._episodes[fork] = _Episode(head=version, base=version)
            self._uses[version] += 1
        return fork

    def drop(self, episode: str) -> tuple[str, ...]:
        """Removes an episode and returns the ids of the versions that went with it; a fork's ancestors stay."""
        with self._lock:
            known = self._episodes.pop(episode, None)
            if known is None:
                return ()
            self._uses.subtract(known.versions)
            if known.base is not None:
                self._uses[known.base] -= 1
            gone: list[str] = []
            for version in (*reversed(known.versions), known.base):
                self._release(version, gone)
        if self._bus is not None:
            self._bus.forget(episode)
        return tuple(gone)

    def episodes(self) -> tuple[str, ...]:
        """Returns the ids of all episodes."""
        with self._lock:
            return tuple(self._episodes)

    def check_integrity(self) -> None:
        """Checks that heads, parents and use counts agree.

        Raises:
            AssertionError: They do not; names the version.
        """
        with self._lock:
            uses: Counter[str] = Counter()
            for name, episode in self._episodes.items():
                assert episode.head == (episode.versions[-1] if episode.versions else episode.base), name
                uses.update([*episode.versions, *filter(None, [episode.base])])
            for version in self._versions.values():
                if version.parent is not None:
                    assert version.parent in self._versions, version.version_id
                    uses[version.parent] += 1
            assert +self._uses == uses, (self._uses - uses) + (uses - self._uses)
            assert self._versions.keys() == uses.keys() == self._buffers.keys(), self._versions.keys() ^ uses.keys()

    def _episode(self, episode: str) -> _Episode:
        known = self._episodes.get(episode)
        if known is None:
            raise UnknownVersionError(f"there is no episode {episode!r}; `episodes` lists them")
        return known

    def _add(self, version: Version) -> None:
        with self._lock:
            if version.version_id in self._versions:
                raise ConfigError(f"new_id made {version.version_id!r} twice; version ids must be unique")
            if version.parent is not None:
                self.version(version.parent)  # it may have been dropped while the diff ran
                self._uses[version.parent] += 1
            episode = self._episodes.setdefault(version.episode, _Episode())
            before = self._buffers.get(version.parent) if version.parent is not None else None
            buffer = before.extended(version.token_ids) if before else Buffer(version.token_ids)
            self._versions[version.version_id] = self._buffered(version, buffer)
            self._uses[version.version_id] += 1
            episode.versions.append(version.version_id)
            episode.head = version.version_id

    def _buffered(self, version: Version, buffer: Buffer) -> Version:
        """Returns a version whose ids are views of a buffer that begins with them, and remembers that."""
        self._buffers[version.version_id] = buffer
        split, stop = len(version.token_ids), len(version.token_ids) + len(version.generated)
        return replace(version, token_ids=buffer.view(0, split), generated=buffer.view(split, stop))

    def _release(self, version: str | None, gone: list[str]) -> None:
        while version is not None and version in self._versions and self._uses[version] == 0:
            parent = self._versions.pop(version).parent
            del self._uses[version], self._buffers[version]
            gone.append(version)
            version = parent
            if parent is not None:
                self._uses[parent] -= 1


def _compare(old: Version | None, prompt: Rendered) -> tuple[PromptDiff, RevisionKind]:
    if old is None:
        return PromptDiff(0, len(prompt.token_ids)), RevisionKind.FIRST
    ids = old.context_ids
    spans = [span for span in old.spans if span.stop <= len(ids)]
    anchors = (spans, prompt.spans) if spans and prompt.spans else None
    pairs = pair_messages(*anchors) if anchors else None
    diff = diff_tokens(ids, prompt.token_ids, anchors=anchors, pairs=pairs)
    return diff, classify(diff, min(len(old.token_ids), len(ids)), spans, prompt.spans, prompt.boundaries, pairs)


def _token_ids(ids: TokenIds) -> TokenArray:
    """Returns ids as an int32 array.

    Raises:
        ConfigError: They are no token ids.
    """
    array = as_ids(ids)
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < 0 or array.max() > limits.max):
        raise ConfigError(f"token ids must lie in [0, {limits.max}], got {array.min()} to {array.max()}")
    return array.astype(np.int32)


def _shared(spans: tuple[MessageSpan, ...], others: tuple[MessageSpan, ...]) -> tuple[MessageSpan, ...]:
    """Returns spans, with the objects of another version where they are equal: a long history is kept once."""
    same = (other if other == span else span for span, other in zip(spans, others, strict=False))
    return (*same, *spans[len(others) :])


def _event(revision: Revision, time_s: float) -> PromptRevised:
    return PromptRevised(
        episode=revision.episode,
        version=revision.version,
        parent=revision.parent,
        kind=revision.kind,
        prefix=revision.diff.prefix,
        aligned=revision.diff.aligned,
        old_len=revision.diff.old_len,
        new_len=revision.diff.new_len,
        labels=tuple(f"{s.role}:{s.message_id}" if s.message_id else s.role for s in revision.spans),
        diff_ms=revision.diff_ms,
        time_s=time_s,
    )
