"""How a template has written messages: where they stand in the next prompt is read off, not found by marks again.

An agent's next prompt is the last one with a few messages more, or other ones in their place. What the template writes around a
content depends on little: the role, and the roles of the neighbours. So a prompt is walked from its beginning, message after
message, each as the template wrote such a one before; only when every character is accounted for, in this order, is the result
taken. Anything else is rendered with marks (`locate`), which then teaches what was new.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import RLock
from typing import Final, TypeVar

from agentcache.episodes.locate import MessageRange, Place
from agentcache.episodes.messages import ChatMessage

__all__ = ["Shapes"]

_FORMS: Final = 4  # ways to write around contents that are remembered for one pair of neighbours
_EDGES: Final = 16  # texts before the first message, and behind the last one
_BODIES: Final = 4096  # messages that are known by their hash
_BODY_CHARACTERS: Final = 16_384  # of such a message at most

_T = TypeVar("_T")
_Key = tuple[str | None, str, str | None, bool]


@dataclass(frozen=True, slots=True)
class _Form:
    """What stands before a content and behind it; the turn closes after `close` characters of the latter."""

    before: str
    after: str
    close: int


@dataclass(frozen=True, slots=True)
class _Body:
    """A message as it was written, where in that its own words are and where its turn closes."""

    text: str
    start: int
    stop: int
    close: int


class Shapes:
    """What is known of one template. Thread-safe."""

    def __init__(self) -> None:
        self._lock = RLock()  # `find` may be taught
        self._edges: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._forms: dict[_Key, OrderedDict[_Form, None]] = {}
        self._bodies: OrderedDict[str, OrderedDict[_Body, None]] = OrderedDict()
        self._silent: dict[_Key, OrderedDict[tuple[str, int], None]] = {}

    def learn(self, text: str, chat: Sequence[ChatMessage], ranges: Sequence[MessageRange]) -> None:
        """Remembers how messages were written, if they stand in their order without a gap."""
        if [r.index for r in ranges] != list(range(len(chat))) or any(a.stop != b.start for a, b in pairwise(ranges)):
            return
        with self._lock:
            _remember(self._edges, (text[: ranges[0].start], text[ranges[-1].stop :]), _EDGES)
            for key, r in zip(_keys(chat), ranges, strict=True):
                self._learn(text, chat[r.index], key, r)

    def learn_body(self, message: ChatMessage, text: str, r: MessageRange) -> None:
        """Remembers how one message was written."""
        with self._lock:
            self._learn_body(text, message, r)

    def find(
        self, text: str, chat: Sequence[ChatMessage], teach: Callable[[ChatMessage], None]
    ) -> list[MessageRange] | None:
        """Returns where the messages stand; None where the text is not made up of what is known.

        Args:
            text: The rendered prompt.
            chat: Its messages.
            teach: Called with a message whose tool calls were never seen; may call `learn_body`.
        """
        with self._lock:
            return next(filter(None, (self._walk(text, chat, edge, teach) for edge in self._edges)), None)

    def _walk(
        self, text: str, chat: Sequence[ChatMessage], edge: tuple[str, str], teach: Callable[[ChatMessage], None]
    ) -> list[MessageRange] | None:
        head, tail = edge
        if not (text.startswith(head) and text.endswith(tail)):
            return None
        at, ranges = len(head), []
        for index, (message, key) in enumerate(zip(chat, _keys(chat), strict=True)):
            found = self._at(text, at, index, message, key, teach)
            if found is None:
                return None
            ranges.append(found)
            at = found.stop
        return ranges if at == len(text) - len(tail) and not _is_unsure(ranges) else None

    def _at(
        self, text: str, at: int, index: int, message: ChatMessage, key: _Key, teach: Callable[[ChatMessage], None]
    ) -> MessageRange | None:
        """Returns the range of a message that is written at a position, in a way that is known."""
        content = message.content or ""
        core = content.strip()
        lead, trail = _blanks(content, core)
        for form in self._forms.get(key, ()) if core else ():
            # Templates keep the blanks around a content, or strip it.
            for first, last in ((lead, trail), ("", "")) if lead or trail else (("", ""),):
                start = at + len(form.before) + len(first)
                stop = start + len(core)
                if (
                    text.startswith(core, start)
                    and text.startswith(form.before + first, at)
                    and text.startswith(last + form.after, stop)
                ):
                    place, behind = Place(index, start, stop, verbatim=True), stop + len(last)
                    return MessageRange(index, at, behind + form.close, behind + len(form.after), place)
        for written, close in self._silent.get(key, ()) if not core else ():
            if text.startswith(written, at):
                return MessageRange(index, at, at + close, at + len(written), None)
        if message.content_hash not in self._bodies and "tool_calls" in message.values:
            teach(message)
        for body in self._bodies.get(message.content_hash, ()):
            if text.startswith(body.text, at):
                own = Place(index, at + body.start, at + body.stop, verbatim=False)
                return MessageRange(index, at, at + body.close, at + len(body.text), own)
        return None

    def _learn(self, text: str, message: ChatMessage, key: _Key, r: MessageRange) -> None:
        if r.place is None:  # nothing in it is its own
            silent = self._silent.setdefault(key, OrderedDict())
            _remember(silent, (text[r.start : r.stop], r.close - r.start), _FORMS)
        elif r.place.verbatim:
            start, stop = r.place.start, r.place.stop
            lead, trail = _blanks(message.content or "", text[start:stop])
            if text.endswith(lead, r.start, start) and text.startswith(trail, stop, r.close):
                start, stop = start - len(lead), stop + len(trail)
            forms = self._forms.setdefault(key, OrderedDict())
            _remember(forms, _Form(text[r.start : start], text[stop : r.stop], r.close - stop), _FORMS)
        else:
            self._learn_body(text, message, r)

    def _learn_body(self, text: str, message: ChatMessage, r: MessageRange) -> None:
        if r.place is None or r.place.verbatim or r.stop - r.start > _BODY_CHARACTERS:
            return
        body = _Body(text[r.start : r.stop], r.place.start - r.start, r.place.stop - r.start, r.close - r.start)
        known = self._bodies.setdefault(message.content_hash, OrderedDict())
        self._bodies.move_to_end(message.content_hash)
        _remember(known, body, _FORMS)
        if len(self._bodies) > _BODIES:
            self._bodies.popitem(last=False)


def _is_unsure(ranges: Sequence[MessageRange]) -> bool:
    """Whether marks might not part messages without words as they stood: they do it between two others that have some."""
    silent = [True, *(r.place is None for r in ranges), True]
    return any(b and (a or c) for a, b, c in zip(silent, silent[1:-1], silent[2:], strict=False))


def _blanks(content: str, core: str) -> tuple[str, str]:
    """Returns what of a content stands before its stripped self, and what behind."""
    if len(content) == len(core):
        return "", ""
    start = content.find(core)
    return content[:start], content[start + len(core) :]


def _keys(chat: Sequence[ChatMessage]) -> list[_Key]:
    """Returns each message's role between those of its neighbours, and whether it calls tools."""
    roles = [None, *(message.role for message in chat), None]
    return [
        (before, message.role, after, "tool_calls" in message.values)
        for before, message, after in zip(roles, chat, roles[2:], strict=False)
    ]


def _remember(known: OrderedDict[_T, None], new: _T, most: int) -> None:
    """Adds one as the first to be tried; the one that was added longest ago goes."""
    known[new] = None
    known.move_to_end(new, last=False)
    if len(known) > most:
        known.popitem()
