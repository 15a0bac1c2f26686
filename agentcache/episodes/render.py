"""Chat messages to token ids, with the place of every message, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from agentcache.episodes.documents import MIN_DOCUMENT_TOKENS, document_ranges
from agentcache.episodes.locate import MessageRange, Place, Syntax, cut_messages, learn_closers, mark, places, search
from agentcache.episodes.messages import ChatMessage, KnownMessages, Tool, normalise_messages, sort_tools
from agentcache.episodes.pieces import ChatTokenizer, Layout, PieceTokenizer, TokenArray
from agentcache.episodes.replies import Replies, Reply, WrittenOrder
from agentcache.episodes.shapes import Shapes
from agentcache.episodes.template import Template, TemplateCall
from agentcache.types import Boundary, BoundaryKind, MessageSpan

__all__ = ["Rendered", "Renderer"]


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A prompt that is ready for the engine.

    Attributes:
        token_ids: `[T]` int32, read-only.
        spans: Messages, ascending and disjoint. What the template adds on its own (a default system turn, the
            generation prompt) belongs to none.
        boundaries: Messages (tool results among them) and documents, ascending by start; a document follows its
            message.
        text: The rendered text; special tokens in it are tokens.
        spliced_tokens: Generated ids that were kept instead of tokenising their text again.
    """

    token_ids: TokenArray
    spans: tuple[MessageSpan, ...]
    boundaries: tuple[Boundary, ...]
    text: str
    spliced_tokens: int = 0


class Renderer:
    """Renders chats for one tokenizer. Thread-safe.

    Args:
        tokenizer: A fast transformers tokenizer with a chat template.
        template_kwargs: Further variables of the template, e.g. `{"enable_thinking": False}`.

    Raises:
        RenderError: The tokenizer is not a fast one, or its template does not render a user message.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._template = Template(tokenizer, template_kwargs or {})
        self._pieces = PieceTokenizer(tokenizer, self._template.samples)
        self._replies = Replies(tokenizer)
        self._known = KnownMessages()
        self._shapes = Shapes()
        self._syntax = Syntax(
            self._template.generation_prompt,
            learn_closers(self._template.endings, self._pieces.specials),
            self._pieces.specials,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] | None = None,
        generated: Iterable[Sequence[int] | TokenArray] = (),
        now: datetime | None = None,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """Returns messages as token ids, with the span of each message.

        Args:
            messages: Dicts with `role` and `content`; `tool_calls`, `tool_call_id`, `name`, `id`, `tags` where they
                apply.
            tools: JSON schemas or functions; rendered in the order of their names.
            generated: Ids of the episode's earlier replies. Where an assistant message has the text of one of them,
                those ids stand in the prompt instead of the tokenisation of the text; arguments of its tool calls keep
                its order.
            now: The date that the template may print. Give the episode's start: its prompt then outlives midnight.
            add_generation_prompt: Whether the assistant's turn is opened at the end.

        Raises:
            RenderError: A message is malformed or the template fails; says what to do.
        """
        replies = self._replies.decode(generated)
        chat = normalise_messages(messages, WrittenOrder(replies), self._known)
        call = TemplateCall(sort_tools(tools) if tools else None, now, add_generation_prompt)
        values = self._template.values(chat)
        text = self._template.text(values, call)
        ranges = self._shapes.find(text, chat, self._teach)
        if ranges is None:
            ranges = cut_messages(text, self._locate(text, chat, values, call), self._syntax)
            self._shapes.learn(text, chat, ranges)
        splices = dict(self._splices(text, chat, ranges, {reply.text: reply for reply in replies}))
        return self._assemble(text, chat, ranges, splices)

    def _teach(self, message: ChatMessage) -> None:
        """Learns how the template writes a message that calls tools from a chat of three."""
        result = {"role": "tool", "content": ".", "tool_call_id": message.values["tool_calls"][0].get("id", "")}
        chat = [*normalise_messages([{"role": "user", "content": "."}]), message, *normalise_messages([result])]
        values, call = self._template.values(chat), TemplateCall(add_generation_prompt=False)
        text = self._template.attempt(values, call)
        if text is not None:
            ranges = cut_messages(text, self._locate(text, chat, values, call), self._syntax)
            for found in ranges:
                if found.index == 1:
                    self._shapes.learn_body(message, text, found)

    def _locate(
        self, text: str, chat: Sequence[ChatMessage], values: Sequence[dict[str, Any]], call: TemplateCall
    ) -> list[Place]:
        base = "Zk7q"
        while base in text:
            base += "7q"
        for thorough in (True, False):
            marked = self._template.attempt(mark(chat, values, base, thorough=thorough), call)
            found = places(marked, text, chat, base) if marked is not None else None
            if found is not None:
                return found
        return search(text, chat)

    def _splices(
        self, text: str, chat: Sequence[ChatMessage], ranges: Sequence[MessageRange], replies: Mapping[str, Reply]
    ) -> Iterator[tuple[int, Reply]]:
        """Yields where replies stand in the text: all that follows the generation prompt, or a whole content."""
        prompt = self._template.generation_prompt
        for r in ranges if replies else ():
            if chat[r.index].role != "assistant" or not self._pieces.can_cut(text, r.close):
                continue
            starts = [r.start + len(prompt)] if text.startswith(prompt, r.start) else []
            # Not after a space: the model never wrote its reply there.
            if r.place is not None and r.place.verbatim and text[r.place.start - 1 : r.place.start] != " ":
                starts.append(r.place.start)
            for start in starts:
                reply = replies.get(text[start : r.close])
                if reply is not None:
                    yield start, reply
                    break

    def _assemble(
        self, text: str, chat: Sequence[ChatMessage], ranges: Sequence[MessageRange], splices: Mapping[int, Reply]
    ) -> Rendered:
        pieces = self._pieces.split(text, [(start, start + len(reply.text)) for start, reply in splices.items()])
        ids = self._pieces.ids([text for start, text in pieces if start not in splices])
        fresh = iter(ids)
        ids = [splices[start].ids if start in splices else next(fresh) for start, _ in pieces]
        layout = Layout(self._pieces, pieces, ids, splices)
        spans: list[MessageSpan] = []
        boundaries: list[Boundary] = []
        end, stop = -1, 0  # of the message before, in characters and tokens: most begin there
        for r in ranges:
            start = stop if r.start == end else layout.token_at(r.start)
            message, end, stop = chat[r.index], r.stop, layout.token_at(r.stop)
            kind = BoundaryKind.TOOL_RESULT if message.role == "tool" else BoundaryKind.MESSAGE
            spans.append(MessageSpan(start, stop, message.role, message.content_hash, message.message_id, message.tags))
            boundaries.append(Boundary(kind, start, stop))
            if r.place is not None and r.place.verbatim and message.role != "assistant":
                boundaries += _documents(text[r.place.start : r.place.stop], r.place.start, layout)
        token_ids = np.concatenate([np.empty(0, np.int32), *ids])
        token_ids.flags.writeable = False
        spliced = sum(len(reply.ids) for reply in splices.values())
        return Rendered(token_ids, tuple(spans), tuple(boundaries), text, spliced)


def _documents(content: str, offset: int, layout: Layout) -> Iterator[Boundary]:
    for first, last, headed in document_ranges(content):
        start, stop = layout.token_at(offset + first), layout.token_at(offset + last)
        if stop - start >= (1 if headed else MIN_DOCUMENT_TOKENS):
            yield Boundary(BoundaryKind.DOCUMENT, start, stop)
