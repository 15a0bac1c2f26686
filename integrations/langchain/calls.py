"""One call of the chat model: what it asks the engine for, and what becomes of the reply."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, message_chunk_to_message
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.outputs import ChatGenerationChunk

from agentcache.episodes import Renderer
from agentcache.errors import RequestError, RequestTimeout
from agentcache.integrations.langchain.engine import EngineHandle
from agentcache.integrations.langchain.families import ParserNames, choose_parsers, template_of
from agentcache.integrations.langchain.forms import Parsed
from agentcache.integrations.langchain.messages import to_chat
from agentcache.integrations.langchain.options import EPISODE_ONLY, merged, take_wanted
from agentcache.integrations.langchain.results import (
    ai_message,
    last_chunk,
    new_chunk,
    report,
    response_metadata,
    usage,
)
from agentcache.integrations.langchain.runs import Run
from agentcache.integrations.langchain.tools import takes_several_calls
from agentcache.integrations.routing import Route, Router
from agentcache.reply import Reply, StreamChunk

if TYPE_CHECKING:
    from agentcache.integrations.langchain.parsing import RequestParser

__all__ = ["Call", "Caller"]

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Call:
    """One call.

    Attributes:
        chat: Its messages.
        options: Of the engine's request.
        parser: Of its reply; None: the reply is text as it stands.
        route: Its episode.
        run: The run that it belongs to.
        retries: How often it is tried again when it fails in the engine.
        chunks: What its stream has given so far.
        ended: Whether its episode knows of its end.
    """

    chat: list[dict[str, Any]]
    options: dict[str, Any]
    parser: RequestParser | None
    route: Route
    run: Run
    retries: int
    chunks: list[AIMessageChunk] = field(default_factory=list)
    ended: bool = False


class Caller:
    """Turns calls into requests, and replies into messages.

    Args:
        engine: Where they run.
        names: Parsers that the caller has chosen; None: by the model.

    Attributes:
        engine: Where they run.
        model: The model's name.
        router: Knows their episodes.
        parsers: Of the model's replies.

    Raises:
        ConfigError: vLLM has no parser of a name.
    """

    def __init__(self, engine: EngineHandle, names: ParserNames) -> None:
        from agentcache.integrations.langchain.parsing import (
            OutputParsers,
        )  # it imports vLLM, which `launch` does quietly

        self.engine = engine
        self.model = engine.cache.config.model
        self.router = Router.of(engine.cache)
        tokenizer, model_type = engine.tokenizer, str(engine.model_config.hf_config.model_type)
        template = template_of(tokenizer)
        known = choose_parsers(template, model_type, self.model.rpartition("/")[2])
        self._tools_are_shown = "tools" in template
        self.parsers = OutputParsers(
            ParserNames(names.tool or known.tool, names.reasoning or known.reasoning),
            tokenizer=tokenizer,
            model_config=engine.model_config,
            prompt_end=lambda: self._prompt_end,
            grammar_waits=engine.grammar_waits,
            grammar_backend=engine.grammar_backend,
            model=self.model,
        )

    @cached_property
    def renderer(self) -> Renderer:
        """Renders prompts as the engine's cache does."""
        return Renderer(self.engine.tokenizer)

    @cached_property
    def _takes_several_calls(self) -> bool:
        return bool(takes_several_calls(self.renderer))

    @cached_property
    def _prompt_end(self) -> list[int]:
        """What the template opens the reply with, as token ids."""
        asked = [{"role": "user", "content": "."}]
        closed = self.renderer.render(asked, add_generation_prompt=False).token_ids
        return [int(token) for token in self.renderer.render(asked).token_ids[len(closed) :]]

    def prepare(
        self,
        messages: Sequence[BaseMessage],
        run: Run,
        own: Mapping[str, Any],
        said: dict[str, Any],
        *,
        parallel: bool | None,
        retries: int,
    ) -> Call:
        """Returns a call that is ready for the engine; end it with `message`, the last of `chunks_of`, or `fail`.

        Run it in the caller's thread and context, which tell which episode the call belongs to.

        Args:
            messages: The prompt.
            run: That the call belongs to.
            own: The model's own options.
            said: The call's keyword arguments.
            parallel: Whether several tool calls may stand in a reply when the call does not say; None: where the template takes them.
            retries: How often it is tried again.

        Raises:
            RenderError: A message holds something else than text.
            ConfigError: An argument is not allowed.
        """
        said = dict(said)
        episode, parent = said.pop("episode", None), said.pop("parent", None)
        if parallel is None:
            parallel = not said.get("tools") or self._takes_several_calls
        wanted = take_wanted(said, parallel=parallel)
        if wanted.tools and not self._tools_are_shown:
            self._tools_are_shown = True  # said once
            logger.warning(
                "the chat template of %r shows no tools: the model does not know of them, and calls one only when it must",
                self.model,
            )
        chat = to_chat(messages)
        parser = self.parsers.of(wanted, chat)
        sampling = parser.sampling if parser is not None else {}
        merged(own, {}, said, wanted, sampling)  # what is not allowed is known before the call has an episode
        route = self.router.route(messages, run.metadata, run.run_id, episode=episode, parent=parent)
        try:
            options = merged(own, route.options, said, wanted, sampling)
        except BaseException as error:
            self.router.failed(route, error)
            raise
        if route.episode is None:
            options = {name: value for name, value in options.items() if name not in EPISODE_ONLY}
        else:
            options |= {"attributes": route.attributes} | ({"parent": route.parent} if route.parent else {})
        return Call(chat, options, parser, route, run, retries)

    # -- on the engine's loop ------------------------------------------------------------------------------------------

    async def reply(self, call: Call) -> Reply:
        """Returns a call's reply.

        Raises:
            AgentCacheError: The request failed, also when it was tried again.
        """
        for left in range(call.retries, -1, -1):
            try:
                reply: Reply = await self.engine.generate(call.route, call.chat, call.options)
                return reply
            except RequestError as error:
                _again(error, left)
        raise AssertionError("unreachable")

    async def pieces(self, call: Call) -> AsyncGenerator[StreamChunk, None]:
        """Yields a call's reply token by token; a request that fails before its first token is tried again."""
        for left in range(call.retries, -1, -1):
            begun = False
            try:
                stream = self.engine.stream(call.route, call.chat, call.options)
                async with contextlib.aclosing(stream):
                    async for piece in stream:
                        begun = True
                        yield piece
                return
            except RequestError as error:
                _again(error, 0 if begun else left)

    # -- in the caller's thread ----------------------------------------------------------------------------------------

    def message(self, call: Call, reply: Reply) -> AIMessage:
        """Returns a call's message, and ends the call."""
        cut = reply.finish_reason == "length"
        parsed = Parsed(reply.text)
        if call.parser is not None:
            parsed = call.parser.parse(reply.text, reply.token_ids, cut=cut)
        facts = self._facts(call, reply, called=bool(parsed.calls))
        message = ai_message(parsed, *facts, cut_at=len(reply.token_ids) if cut else None)
        self._finish(call, reply, message)
        return message

    def chunks_of(self, call: Call, piece: StreamChunk) -> Iterator[ChatGenerationChunk]:
        """Yields what is new with a piece of a stream; the last piece also ends the call, and its chunk carries usage and metadata."""
        finished = piece.reply is not None
        if call.parser is not None:
            parsed = call.parser.delta(piece.text, piece.token_ids, finished=finished)
        else:
            parsed = Parsed(piece.text)
        chunks = [new_chunk(parsed)] if parsed else []
        if piece.reply is not None:
            called = any(chunk.tool_call_chunks for chunk in (*call.chunks, *(_message(c) for c in chunks)))
            chunks.append(last_chunk(*self._facts(call, piece.reply, called=called)))
        call.chunks += [_message(chunk) for chunk in chunks]
        if piece.reply is not None:
            whole = message_chunk_to_message(add_ai_message_chunks(call.chunks[0], *call.chunks[1:]))
            self._finish(call, piece.reply, whole)
        yield from chunks

    def fail(self, call: Call, error: BaseException | None = None) -> None:
        """Ends a call that has no message; one that has ended stays as it is."""
        if not call.ended:
            call.ended = True
            self.router.failed(call.route, error)

    def _finish(self, call: Call, reply: Reply, message: BaseMessage) -> None:
        call.ended = True
        self.router.finished(call.route, reply, message, call.run)

    def _facts(self, call: Call, reply: Reply, *, called: bool) -> tuple[Any, dict[str, Any]]:
        reasoning = call.parser.reasoning_tokens if call.parser is not None else None
        known = report(call.route, reply, self.engine.kind(reply.version))
        return usage(reply, reasoning), response_metadata(self.model, reply, called=called, report=known)


def _message(chunk: ChatGenerationChunk) -> AIMessageChunk:
    assert isinstance(chunk.message, AIMessageChunk)
    return chunk.message


def _again(error: RequestError, left: int) -> None:
    """Raises an error that is not worth another try, or the last one."""
    if isinstance(error, RequestTimeout) or left == 0:
        raise error
    logger.warning("a request failed and is tried again, %d tries left: %s", left, error)
