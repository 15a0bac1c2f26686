"""Where each message stands in a rendered prompt, for any chat template.

No assumption is made that a template renders a prefix of the messages to a prefix of the text: Qwen3 and GLM drop
earlier thinking, DeepSeek collects the system messages, others merge tool results into one turn. So the messages are
rendered a second time with a mark inside each (`mark`). When the marked text without its marks is the plain text, the
marks did not change what the template does, and their places are exact (`places`). Else the contents are searched in
order (`search`).

A mark says where a message's content is; its span takes in the template's own text around it. Between the contents of
two neighbours the cut is, in this order:
1. after the first token that closes a turn (`<|im_end|>`, `</s>`), and the whitespace and closing tokens that follow;
2. before the first special token (`<|user|>`: a template that only opens turns);
3. after whitespace and closing tags such as `</tool_response>` or `[/INST]` that are plain text.
Which tokens close a turn is learned by rendering small chats (`learn_closers`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from agentcache.episodes.messages import ChatMessage

__all__ = ["MessageRange", "Place", "Syntax", "cut_messages", "learn_closers", "mark", "places", "search"]

_TAG = re.compile(r"<[^<>]{0,64}>")
_PLAIN_CLOSERS = re.compile(r"\s*(?:(?:<{1,2}/[^<>]{0,64}>{1,2}|\[/[^\[\]]{0,64}\])\s*)*")
_TAIL = 256  # characters at the end of a content in which a mark may stand


@dataclass(frozen=True, slots=True)
class Syntax:
    """What a template writes around messages.

    Attributes:
        generation_prompt: What it adds for the assistant's turn.
        closers: Pattern of the tokens that close a turn, or None.
        specials: Pattern of all special tokens of the template, or None.
    """

    generation_prompt: str
    closers: re.Pattern[str] | None
    specials: re.Pattern[str] | None

    def cut(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """Returns where the message before ends and where the next one starts, between two contents."""
        closer = self.closers.search(text, start, stop) if self.closers else None
        if closer and self.closers:
            after = closer.end()
            while after < stop:
                more = self.closers.match(text, after, stop)
                if more is None and not text[after].isspace():
                    break
                after = more.end() if more else after + 1
            return closer.start(), after
        special = self.specials.search(text, start, stop) if self.specials else None
        if special:
            return special.start(), special.start()
        plain = _PLAIN_CLOSERS.match(text, start, stop)
        return start, plain.end() if plain else start


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message's own words are: [start, stop) of the text; `verbatim` when that is its stripped content."""

    index: int
    start: int
    stop: int
    verbatim: bool


@dataclass(frozen=True, slots=True)
class MessageRange:
    """A message in the text, in characters: `[start, stop)` with the template's words, which close it at `close`."""

    index: int
    start: int
    close: int
    stop: int
    place: Place | None


def mark(
    messages: Sequence[ChatMessage], values: Sequence[dict[str, Any]], base: str, *, thorough: bool
) -> list[dict[str, Any]]:
    """Returns the messages' template values with a mark in each; `thorough` marks tool calls and empty contents too."""
    marked = []
    for index, (message, plain) in enumerate(zip(messages, values, strict=True)):
        own, calls = dict(plain), plain.get("tool_calls")
        content = message.content or ""
        if content.strip() or (thorough and not calls):
            own["content"] = _insert(content, f"{base}{3 * index}q")
        if thorough and calls:
            function = dict(calls[-1]["function"])
            function["name"] += f"{base}{3 * index + 1}q"
            function["arguments"] = _mark_last_text(function["arguments"], f"{base}{3 * index + 2}q")
            own["tool_calls"] = [*calls[:-1], {**calls[-1], "function": function}]
        marked.append(own)
    return marked


def places(marked_text: str, text: str, messages: Sequence[ChatMessage], base: str) -> list[Place] | None:
    """Returns where the marked messages are in the plain text; None when the marks changed more than themselves."""
    parts = re.split(rf"{base}(\d+)q", marked_text)
    if "".join(parts[::2]) != text:
        return None
    # A template may write a name once more in the tool's result: what counts is where a mark comes first.
    at, seen = 0, dict[int, dict[int, int]]()
    for words, sign in zip(parts[::2], parts[1::2], strict=False):
        at += len(words)
        index, kind = divmod(int(sign), 3)
        seen.setdefault(index, {}).setdefault(kind, at)
    return [_place(text, index, messages[index].content, marks) for index, marks in seen.items()]


def search(text: str, messages: Sequence[ChatMessage]) -> list[Place]:
    """Returns where the contents are found, one after the other; what a template rewrote or moved is left out."""
    found, at = [], 0
    for index, message in enumerate(messages):
        core = (message.content or "").strip()
        start = text.find(core, at) if core else -1
        if start >= 0:
            at = start + len(core)
            found.append(Place(index, start, at, verbatim=True))
    return found


def cut_messages(text: str, found: Sequence[Place], syntax: Syntax) -> list[MessageRange]:
    """Returns the spans of messages, ascending and disjoint.

    A message that left no trace (an empty one) has a span when the turns between its neighbours are closed one by one.
    """
    if not found:
        return []
    order = sorted(found, key=lambda place: place.start)
    ends_with_prompt = bool(syntax.generation_prompt) and text.endswith(syntax.generation_prompt)
    end = len(text) - len(syntax.generation_prompt) if ends_with_prompt else len(text)
    start = _head(text, order[0].start, syntax)
    ranges = []
    for here, following in pairwise([*order, None]):
        assert here is not None
        stop = following.start if following else max(end, here.stop)
        close, cut = syntax.cut(text, min(here.stop, stop), stop)
        if following is None and ends_with_prompt:
            cut = stop
        ranges.append(MessageRange(here.index, start, close, cut, here))
        missing = following.index - here.index - 1 if following else 0
        for step in range(max(missing, 0)):
            closer = syntax.closers.search(text, cut, stop) if syntax.closers else None
            if closer is None:
                break
            close, after = syntax.cut(text, cut, stop)
            ranges.append(MessageRange(here.index + 1 + step, cut, close, after, None))
            cut = after
        start = cut
    return ranges


def learn_closers(endings: Iterable[str], specials: re.Pattern[str] | None) -> re.Pattern[str] | None:
    """Returns the pattern of the special tokens at the end of chats: what follows the last words without a new turn."""
    closers: set[str] = set()
    for ending in endings:
        rest = ending
        for special in reversed(list(specials.finditer(rest)) if specials else []):
            if rest[special.end() :].strip():
                break
            closers.add(special.group())
            rest = rest[: special.start()]
    return re.compile("|".join(re.escape(c) for c in sorted(closers, key=len, reverse=True))) if closers else None


def _head(text: str, first: int, syntax: Syntax) -> int:
    """Returns where the first message starts: after a turn that the template put before it, else at 0."""
    last = 0
    if syntax.closers:
        for closer in syntax.closers.finditer(text, 0, first):
            last = closer.end()
    while 0 < last < first and text[last].isspace():
        last += 1
    return last


def _place(text: str, index: int, content: str | None, marks: dict[int, int]) -> Place:
    """Returns a message's place from its marks: 0 in the content, 1 and 2 in its last tool call."""
    first, last = min(marks.values()), max(marks.values())
    if 0 in marks and content and (core := content.strip()):
        start = marks[0] - (_mark_at(content) - (len(content) - len(content.lstrip())))
        if start >= 0 and text.startswith(core, start):
            return Place(index, min(start, first), max(start + len(core), last), len(marks) == 1)
    return Place(index, first, last, verbatim=False)


def _insert(text: str, sign: str) -> str:
    at = _mark_at(text)
    return text[:at] + sign + text[at:]


def _mark_at(text: str) -> int:
    """Returns where a mark disturbs a template least: inside the last word that is not inside a tag, else at the end.

    Templates test how a content starts and ends, split it at tags, and strip it: all that sees the same text.
    """
    end = len(text.rstrip())
    begin = max(end - _TAIL, 0)
    return begin + _mark_in(text[begin:end])


@lru_cache(maxsize=8192)
def _mark_in(tail: str) -> int:
    """Returns where a mark goes in the end of a content; a history is marked again and again."""
    tags = [m.span() for m in _TAG.finditer(tail)]
    for at in range(len(tail) - 1, 0, -1):
        if tail[at - 1].isalnum() and tail[at].isalnum() and not any(a < at < b for a, b in tags):
            return at
    return len(tail)


def _mark_last_text(arguments: Any, sign: str) -> Any:
    """Returns arguments with a mark in the last value when that is text; as they are otherwise."""
    if not isinstance(arguments, dict) or not arguments:
        return arguments
    key = next(reversed(arguments))
    return {**arguments, key: _insert(arguments[key], sign)} if isinstance(arguments[key], str) else arguments
