"""The episodes of threads and runs as a router knows them: where each ran, what its versions said, which calls are open."""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Self

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables.config import var_child_runnable_config

from agentcache.integrations.overlap import Fingerprint, fingerprint, overlap

__all__ = ["Choice", "Line", "Lines", "Place"]

_LOOKED_BACK: Final = 16  # versions of an episode that a prompt is compared with
_LINES_LOOKED_AT: Final = 32  # episodes of a thread whose newest versions a new one is compared with
_REMEMBERED: Final = 512  # versions of an episode that a checkpoint may name
_MOST_THREADS: Final = 10_000  # threads that are remembered; one that is not begins with its episode's head
_SAME: Final = 0.5  # share of text in common that makes a subgraph's prompt the next of an episode
_LONGEST_ID: Final = 200
_RETIRED_AT_ONCE: Final = 16  # episodes without a thread that are looked at when one begins
_MARKS: Final = re.compile("[/~\ud800-\udfff]")  # what parts of an episode's id begin with, and what is no text
# LangChain's id of a reply that has none of its own holds the id of its run.
_RUN_ID: Final = re.compile(r"lc_run-{1,2}([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a graph a model is called.

    Attributes:
        thread: Its thread; None: nothing is kept between its runs.
        namespace: Of its task; the last segment is the node's.
        path: The namespace without the node.
        nodes: The path without the ids of its tasks: the same each turn.
        step: Of its graph's run.
        checkpoint: That the node runs on; "" when unknown.
        outer: The checkpoint that the graph around its own one runs on; "" when unknown or when there is none.
        resumed: The checkpoint that the caller named to start the run from, "" when none.
        node: Its node.
    """

    thread: str | None = None
    namespace: str = ""
    path: str = ""
    nodes: str = ""
    step: int = 0
    checkpoint: str = ""
    outer: str = ""
    resumed: str = ""
    node: str = ""

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self:
        """Returns the place of a model call with these metadata of its run, in the context that the model is called in."""
        thread = metadata.get("thread_id")
        namespace = str(metadata.get("langgraph_checkpoint_ns") or metadata.get("checkpoint_ns") or "")
        segments = namespace.split("|")[:-1]
        path = "|".join(segments)
        config = var_child_runnable_config.get() or {}
        checkpoints = (config.get("configurable") or {}).get("checkpoint_map") or {}
        return cls(
            thread=None if thread in (None, "") else str(thread),
            namespace=namespace,
            path=path,
            nodes="/".join(_escaped(segment.partition(":")[0]) for segment in segments),
            step=int(metadata.get("langgraph_step") or 0),
            checkpoint=str(checkpoints.get(path) or ""),
            outer=str(checkpoints.get("|".join(segments[:-1])) or "") if segments else "",
            resumed=str(metadata.get("checkpoint_id") or ""),
            node=str(metadata.get("langgraph_node") or ""),
        )

    def attributes(self) -> dict[str, Any]:
        """Returns what a version keeps of it."""
        values = {
            "thread_id": self.thread,
            "checkpoint_ns": self.namespace,
            "checkpoint_id": self.checkpoint,
            "resumed_from": self.resumed,
            "node": self.node,
            "step": self.step,
        }
        return {name: value for name, value in values.items() if value not in (None, "")}


@dataclass(slots=True)
class _Version:
    version: str
    prompt: Fingerprint | None
    checkpoint: str


class Best(NamedTuple):
    """A version and its score."""

    version: str | None
    score: int


class Line:
    """One episode.

    Attributes:
        episode: Its id.
        paths: The namespaces that it ran in.
        outer: The checkpoint of the graph around it, the last time.
        calls_tools: Whether its last reply did.
        last: Number of its last call among all calls.
        forgotten: Whether its thread was forgotten.
    """

    def __init__(self, episode: str) -> None:
        self.episode = episode
        self.paths: set[str] = set()
        self.outer = ""
        self.calls_tools = False
        self.last = 0
        self.forgotten = False
        self._versions: deque[_Version] = deque(maxlen=_REMEMBERED)
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._run = Place()

    @property
    def open(self) -> bool:
        """Whether a call of it has not ended."""
        return bool(self._calls)

    @property
    def head(self) -> str | None:
        """Its newest version."""
        return self._versions[-1].version if self._versions else None

    def shares(self, prompt: Fingerprint) -> tuple[int, int]:
        """Returns the characters that a prompt has of the newest version's messages, and of all that the shorter one says."""
        newest = self._versions[-1].prompt if self._versions else None
        if newest is None:
            return 0, 0
        return overlap(newest, prompt).said, min(newest.said, prompt.said)

    def best(self, prompt: Fingerprint, until: str | None = None) -> Best:
        """Returns the version that shares most with a prompt; of equals the shortest, of those the newest.

        Args:
            prompt: To be compared with the newest versions.
            until: A checkpoint: only versions of it and earlier ones; None: all.
        """
        found, shortest = Best(None, -1), 0
        for version in list(self._versions)[: -_LOOKED_BACK - 1 : -1]:
            assert version.prompt is not None
            # Ids of checkpoints ascend with time.
            if until is not None and not "" < version.checkpoint <= until:
                continue
            shared = overlap(version.prompt, prompt)
            size = len(version.prompt.keys)
            if shared.score > found.score or (shared.score == found.score and size < shortest):
                found, shortest = Best(version.version, shared.score), size
            if shared.is_append and version.version == self.head:
                break
        return found

    def resumed_version(self, place: Place, prompt: Fingerprint) -> str | None:
        """Returns the version of the checkpoint that a run was started from, for the first call of that run."""
        before, self._run = self._run, place
        if not place.resumed:
            return None
        same_run = place.resumed == before.resumed and (
            place.step > before.step or (place.step, place.namespace) == (before.step, before.namespace)
        )
        if same_run:
            return None
        earlier = [v for v in reversed(self._versions) if "" < v.checkpoint <= place.resumed]
        exact = next((v.version for v in earlier if v.checkpoint == place.resumed), None)
        # Between two model calls it is the former's prompt and reply that stand there, on one branch or the other.
        found = exact or self.best(prompt, place.resumed).version
        return found if found is not None or not earlier else earlier[0].version

    def add(self, version: str, prompt: Fingerprint, checkpoint: str) -> None:
        """Adds a version."""
        self._versions.append(_Version(version, prompt, checkpoint))
        if len(self._versions) > _LOOKED_BACK:
            self._versions[-_LOOKED_BACK - 1].prompt = None


class Choice(NamedTuple):
    """A line for a call, the version that it is recovered from (None: the head) and why it is another one."""

    line: Line
    parent: str | None
    reason: str
    prompt: Fingerprint
    place: Place


@dataclass(slots=True)
class _Nodes:
    """The lines of one graph in one thread; `count` of them were begun."""

    lines: list[Line] = field(default_factory=list)
    count: int = 0


class Lines:
    """All lines of one cache. Not thread-safe.

    Args:
        most_runs: Lines without a thread, and of one subgraph in one thread, that are kept beside those with an open call.
    """

    def __init__(self, most_runs: int) -> None:
        self._most = most_runs
        self._threads: OrderedDict[str, dict[str, _Nodes]] = OrderedDict()
        self._runs: OrderedDict[str, Line] = OrderedDict()
        self._replies: weakref.WeakValueDictionary[str, Line] = weakref.WeakValueDictionary()
        self._open: weakref.WeakKeyDictionary[Any, Choice] = weakref.WeakKeyDictionary()
        self._retired: list[str] = []
        self._count = 0

    def choose(self, place: Place, messages: Sequence[BaseMessage], run: str) -> Choice:
        """Returns the line of a call, a new one where none fits."""
        prompt = fingerprint(messages)
        line = self._run_line(messages, run) if place.thread is None else self._thread_line(place, messages, prompt)
        line.paths.add(place.path)
        line.outer = place.outer
        parent, reason = line.resumed_version(place, prompt), "the checkpoint that was resumed from"
        if parent is None:
            parent, reason = self._nearest(line, place, prompt)
        is_head = parent == line.head
        return Choice(line, None if is_head else parent, "" if is_head else reason, prompt, place)

    def begin(self, choice: Choice, call: Any) -> None:
        """Marks a line as busy until the call ends, or is gone."""
        self._count += 1
        choice.line.last = self._count
        choice.line._calls.add(call)
        self._open[call] = choice

    def end(self, call: Any, version: str | None, reply: BaseMessage | None) -> tuple[str, ...]:
        """Ends a call, with the version that it has created if it has one.

        Returns:
            The id of its line when that was forgotten meanwhile and nothing has begun it anew: the call may have.
        """
        choice = self._open.pop(call, None)
        if choice is None:
            return ()
        line = choice.line
        line._calls.discard(call)
        if version is not None and reply is not None:
            line.add(version, choice.prompt.then(reply), choice.place.checkpoint)
            line.calls_tools = isinstance(reply, AIMessage) and bool(reply.tool_calls)
            for key in (call.attributes.get("run_id"), _reply_key(reply)):
                if key is not None:
                    self._replies[key] = line
        if not line.forgotten or line.episode in self.episodes(choice.place.thread or ""):
            return ()
        return (line.episode,)

    def episodes(self, thread: str) -> tuple[str, ...]:
        """Returns the ids of a thread's lines."""
        return tuple(line.episode for nodes in self._threads.get(thread, {}).values() for line in nodes.lines)

    def waiting(self, thread: str) -> tuple[str, ...]:
        """Returns the ids of a thread's lines whose tool calls have no answer; else of its own, else of the last one called."""
        graphs = self._threads.get(thread, {})
        lines = [line for nodes in graphs.values() for line in nodes.lines]
        found = [line for line in lines if line.calls_tools and not line.open]
        if not found and "" in graphs:
            found = [max(graphs[""].lines, key=lambda line: line.last)]
        if not found and lines:
            found = [max(lines, key=lambda line: line.last)]
        return tuple(line.episode for line in found)

    def forget(self, thread: str) -> tuple[str, ...]:
        """Removes a thread and returns the ids of its lines; one of an earlier process has the id of its thread."""
        gone = [line for nodes in self._threads.pop(thread, {}).values() for line in nodes.lines]
        for line in gone:
            line.forgotten = True
        if gone or not thread:
            return tuple(line.episode for line in gone)
        return (_episode_id(thread, "", 0),)

    def retire(self) -> tuple[str, ...]:
        """Returns the ids of the lines that were removed since the last call to make room."""
        gone, self._retired = tuple(self._retired), []
        return gone

    def _run_line(self, messages: Sequence[BaseMessage], run: str) -> Line:
        known = self._line_of_reply(messages)
        if known is not None and not known.open and known.episode in self._runs:
            self._runs.move_to_end(known.episode)
            return known
        for _ in range(min(len(self._runs) + 1 - self._most, len(self._runs), _RETIRED_AT_ONCE)):
            name, oldest = self._runs.popitem(last=False)
            if oldest.open:
                self._runs[name] = oldest
            else:
                self._retired.append(name)
        line = self._runs[f"run-{run}"] = Line(f"run-{run}")
        return line

    def _thread_line(self, place: Place, messages: Sequence[BaseMessage], prompt: Fingerprint) -> Line:
        assert place.thread is not None
        nodes = self._threads.setdefault(place.thread, {}).setdefault(place.nodes, _Nodes())
        self._threads.move_to_end(place.thread)
        while len(self._threads) > _MOST_THREADS:
            self._threads.popitem(last=False)
        here = [line for line in nodes.lines if place.path in line.paths]
        free = [line for line in here if not line.open]
        if not here:
            # The namespace is new: another turn of a subgraph, or another task of this one. The latter are never shared.
            elsewhere = [n for n in nodes.lines if not n.open and not (place.outer and place.outer == n.outer)]
            free = [line for line in _recent(elsewhere) if self._goes_on(line, messages, prompt)]
        if free:
            return free[0] if len(free) == 1 else max(free, key=lambda line: line.best(prompt).score)
        idle = [line for line in nodes.lines if not line.open]
        for oldest in idle[: max(len(nodes.lines) + 1 - self._most, 0)]:
            nodes.lines.remove(oldest)
            self._retired.append(oldest.episode)
        line = Line(_episode_id(place.thread, place.nodes, nodes.count))
        nodes.lines.append(line)
        nodes.count += 1
        return line

    def _goes_on(self, line: Line, messages: Sequence[BaseMessage], prompt: Fingerprint) -> bool:
        if any(self._replies.get(key) is line for message in messages if (key := _reply_key(message)) is not None):
            return True
        said, most = line.shares(prompt)
        return said >= _SAME * most > 0

    def _nearest(self, line: Line, place: Place, prompt: Fingerprint) -> tuple[str | None, str]:
        """Returns the version that shares most with a prompt: of its line, else, for a new one, of its thread."""
        version = line.best(prompt).version
        if version is not None or place.thread is None:
            return version, "it has more text in common than the head"
        others = [other for nodes in self._threads[place.thread].values() for other in nodes.lines if other is not line]
        near = max(_recent(others), key=lambda other: other.shares(prompt)[0], default=None)
        if near is None or not near.shares(prompt)[0] >= _SAME * prompt.said > 0:
            return None, ""
        return near.head, f"it has text in common with episode {near.episode!r}"

    def _line_of_reply(self, messages: Sequence[BaseMessage]) -> Line | None:
        keys = (_reply_key(message) for message in reversed(messages))
        return next((self._replies[key] for key in keys if key is not None and key in self._replies), None)


def _recent(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: line.last)[-_LINES_LOOKED_AT:]


def _reply_key(message: BaseMessage) -> str | None:
    if not isinstance(message, AIMessage) or message.id is None:
        return None
    found = _RUN_ID.match(message.id)
    return found[1] if found else message.id


def _episode_id(thread: str, nodes: str, number: int) -> str:
    """Returns the id of a thread's line, which no other line has, whatever the thread is called."""
    whole = _escaped(thread) + (f"/{nodes}" if nodes else "") + (f"~{number}" if number else "")
    if len(whole) <= _LONGEST_ID:
        return whole
    return f"{whole[: _LONGEST_ID - 33]}-{blake2b(whole.encode(), digest_size=16).hexdigest()}"


def _escaped(name: str) -> str:
    return _MARKS.sub(lambda mark: f"~{ord(mark[0]):x};", name)
