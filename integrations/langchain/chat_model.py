"""`ChatAgentCache`: LangChain's chat model on an embedded vLLM whose KV follows every revision of the prompt."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import Field, PrivateAttr, SecretStr, ValidationError

from agentcache.cache import AgentCache
from agentcache.errors import ConfigError, RenderError
from agentcache.integrations.langchain.arguments import check_running, take_settings
from agentcache.integrations.langchain.calls import Call, Caller
from agentcache.integrations.langchain.engine import EngineHandle
from agentcache.integrations.langchain.families import ParserNames
from agentcache.integrations.langchain.messages import to_chat
from agentcache.integrations.langchain.results import PROVIDER
from agentcache.integrations.langchain.runs import astream_in, begin, run_of, running, stream_in
from agentcache.integrations.langchain.structured import Method, structured
from agentcache.integrations.langchain.tools import ToolLike, choose, format_tools, rendered
from agentcache.integrations.routing import Router

__all__ = ["ChatAgentCache"]


class ChatAgentCache(BaseChatModel):
    """A chat model on an embedded vLLM: the KV of a prompt that was revised is recovered, not computed again.

    ```python
    with ChatAgentCache(model="smollm2", policy="edit_local") as model:  # starts an engine, and ends it
        agent = create_agent(model, tools)

    with AgentCache("smollm2") as cache:
        model = ChatAgentCache(cache=cache)  # on one that runs; several models may share it
    ```

    Each call becomes a version of its episode: that of LangGraph's thread, or of the conversation that its messages go on with.
    A middleware's own calls belong to none. A call may give any option of `AgentCache.episode(id).generate` (`policy`, `timeout`,
    `sources` …), and `episode` and `parent` of its own.

    Attributes:
        model: A folder, a hub id, or the name of a built-in model.
        temperature: 0 is greedy.
        top_p: Probability mass that is sampled from.
        max_tokens: Most tokens to generate; None: until the model's length.
        timeout: Seconds until a request is aborted and `RequestTimeout` is raised.
        stop: Strings that end a reply; they are not part of it.
        max_retries: How often a request that failed in the engine is tried again; one that took too long is not.
        streaming: Whether `invoke` streams too, for callbacks that take tokens.
        seed: Of the sampling.
        policy: Recovery policy; None takes the cache's. The exact one is `prefix_cache`.
        policy_options: The policy's own settings.
        parallel_tool_calls: Whether a reply may call several tools when the call does not say; None: where the model's chat template
            takes such a reply.
        tool_parser: vLLM's parser of tool calls; None chooses by the model, `none` has none.
        reasoning_parser: vLLM's parser of reasoning; None chooses by the model, `none` has none.
        extra: Further fields of vLLM's `SamplingParams`.
        settings: Settings of the cache that the model starts. Those that are no fields of the model itself may also be given
            as arguments.
        api_key: Taken, so that models can be exchanged for each other, and never used.
        engine: The cache that the model runs on.

    Raises:
        ConfigError: An argument is unknown or not allowed.
        UnsupportedModelError: The model's KV cannot be recovered; lists why.
        EngineDeadError: The engine did not start.
    """

    model: str = "smollm2"
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    timeout: float | None = Field(default=None, gt=0)
    stop: list[str] | None = None
    max_retries: int = Field(default=2, ge=0)
    streaming: bool = False
    seed: int | None = None
    policy: str | None = None
    policy_options: dict[str, int | float | str | bool | None] | None = None
    parallel_tool_calls: bool | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    extra: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    engine: Any = Field(default=None, exclude=True, repr=False)

    _owned: AgentCache | None = PrivateAttr(default=None)
    _caller: Caller | None = PrivateAttr(default=None)

    def __init__(self, **given: Any) -> None:
        cache = given.get("cache")
        if cache is not None and not isinstance(cache, bool | BaseCache):
            given["engine"] = given.pop("cache")  # LangChain's own `cache` keeps replies
            check_running(cache, {k: v for k, v in given.items() if k != "engine"}, type(self).model_fields)
        elif given.get("engine") is None:
            given["settings"] = take_settings(given, type(self).model_fields)
        try:
            super().__init__(**given)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))}={e.get('input')!r:.80}: {e['msg']}" for e in error.errors()]
            raise ConfigError("these arguments are not allowed:\n  " + "\n  ".join(lines)) from error
        if self.engine is None:
            own: dict[str, Any] = {"policy_options": self.policy_options} if self.policy_options else {}
            own |= {"policy": self.policy} if self.policy else {}
            self.engine = self._owned = AgentCache(self.model, **own, **self.settings)
        self.model = self.engine.config.model
        if self.profile is None:
            self.profile: ModelProfile | None = self._resolve_model_profile()

    # -- life ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the engine if this model has started it. Idempotent."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def router(self) -> Router:
        """Which episode a call belongs to; all chat models and middlewares of one cache share it."""
        return Router.of(self.engine)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._prepare(messages, stop, run_manager, kwargs)
        with self._ending(call):
            reply = self._calls.engine.call(self._calls.reply(call))
            return _result(self._calls.message(call, reply))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._prepare(messages, stop, run_manager, kwargs)
        with self._ending(call):
            reply = await self._calls.engine.acall(self._calls.reply(call))
            return _result(self._calls.message(call, reply))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._prepare(messages, stop, run_manager, kwargs)
        with self._ending(call), contextlib.closing(self._calls.engine.iterate(self._calls.pieces(call))) as pieces:
            for piece in pieces:
                yield from self._calls.chunks_of(call, piece)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._prepare(messages, stop, run_manager, kwargs)
        with self._ending(call):
            async with contextlib.aclosing(self._calls.engine.aiterate(self._calls.pieces(call))) as pieces:
                async for piece in pieces:
                    for chunk in self._calls.chunks_of(call, piece):
                        yield chunk

    def _prepare(self, messages: list[BaseMessage], stop: list[str] | None, run_manager: Any, said: Any) -> Call:
        said = {name: value for name, value in said.items() if name != "stream"}
        if (other := said.pop("model", self.model)) != self.model:
            raise ConfigError(f"this engine runs {self.model!r}, not {other!r}; make another ChatAgentCache for that")
        if stop is not None:
            said["stop"] = stop
        return self._calls.prepare(
            messages,
            run_of(run_manager),
            self._options,
            said,
            parallel=self.parallel_tool_calls,
            retries=self.max_retries,
        )

    @contextlib.contextmanager
    def _ending(self, call: Call) -> Iterator[None]:
        """Ends a call whatever becomes of it: also one whose stream is given up."""
        try:
            yield
        except BaseException as error:
            self._calls.fail(call, error)
            raise

    # LangChain does not tell `_stream` which run it belongs to, and with it which thread.

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Yields the reply as it comes; closing the iterator aborts it."""
        config, run = begin(config, self.metadata, synchronous=True)
        yield from stream_in(run, super().stream(input, config, stop=stop, **kwargs))

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Yields the reply as it comes; closing the iterator aborts it."""
        config, run = begin(config, self.metadata, synchronous=False)
        async with contextlib.aclosing(astream_in(run, super().astream(input, config, stop=stop, **kwargs))) as chunks:
            async for chunk in chunks:
                yield chunk

    def _generate_with_cache(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        with running(run_manager):
            return super()._generate_with_cache(messages, stop, run_manager, **kwargs)

    async def _agenerate_with_cache(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        with running(run_manager):
            return await super()._agenerate_with_cache(messages, stop, run_manager, **kwargs)

    # -- tools and structure -------------------------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Returns the model with tools that it may call.

        Args:
            tools: Functions, LangChain tools, pydantic classes, typed dicts or schemas.
            tool_choice: `auto` or None leaves it to the model, `none` forbids it, `any`, `required` and True force a call of one of
                them, a name (or a dict that names one) a call of that one.
            strict: Whether arguments must follow the schema; None: those of a call that is forced.
            **kwargs: Further arguments of each call, e.g. `parallel_tool_calls=False`.

        Raises:
            ConfigError: The model has no known parser of tool calls, or the choice is no tool's name.
        """
        formatted = format_tools(tools, strict)
        if not formatted:
            return self.bind(**kwargs)
        self._calls.parsers.check_tools()
        return self.bind(tools=formatted, tool_choice=choose(tool_choice, formatted), **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Method | None = None,
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Returns the model with replies that are instances of a schema; see `structured.structured`.

        Args:
            schema: A pydantic class, a typed dict, a JSON schema or an OpenAI function.
            method: `function_calling`, `json_schema` or `json_mode`; None: the first where the model has a parser of tool calls,
                else the second.
            include_raw: Whether the message comes with it, as `{"raw", "parsed", "parsing_error"}`.
            strict: Whether the tool's arguments must follow the schema; None: yes.
            **kwargs: Further arguments of each call.
        """
        if method is None:
            method = "json_schema" if self._calls.parsers.names.tool is None else "function_calling"
        return structured(self, schema, method, strict=strict, include_raw=include_raw, options=kwargs)

    # -- what is known of the model ------------------------------------------------------------------------------------

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None) -> int:
        """Returns the tokens of a prompt, by the model's chat template.

        Of a part of a history that the template refuses (one that begins with a tool's result, say), the tokens of its contents and
        tool calls.
        """
        chat = to_chat(messages)
        shown = rendered(format_tools(tools)) if tools else None
        if not chat and not shown:
            return 0
        try:
            return len(self._calls.renderer.render(chat, tools=shown).token_ids)
        except RenderError:
            texts = [str(part) for message in chat for part in (message["content"], *message.get("tool_calls", ()))]
            return sum(map(self.get_num_tokens, [*texts, *map(str, shown or ())]))

    def get_token_ids(self, text: str) -> list[int]:
        """Returns the token ids of a text."""
        return list(self._calls.engine.tokenizer.encode(text, add_special_tokens=False))

    def _resolve_model_profile(self) -> ModelProfile | None:
        if self.engine is None:
            return None
        handle, names = self._calls.engine, self._calls.parsers.names
        longest = handle.max_model_len
        reply = min(self.max_tokens or longest // 4, longest // 2)
        return ModelProfile(
            name=self.model_name,
            max_input_tokens=longest - reply,
            max_output_tokens=self.max_tokens or longest,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            pdf_inputs=False,
            reasoning_output=names.reasoning is not None,
            tool_calling=names.tool is not None,
            tool_choice=names.tool is not None,
            tool_call_streaming=names.tool is not None,
            structured_output=self._calls.parsers.combines,
        )

    @property
    def model_name(self) -> str:
        """The model's name, as the cache was given it."""
        return self.model

    @property
    def _llm_type(self) -> str:
        return "agentcache-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {"model": self.model, **self._options}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        found = super()._get_ls_params(stop=stop or self.stop or None, **kwargs)
        found["ls_provider"] = PROVIDER
        return found

    @property
    def _options(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "max_tokens", "timeout", "stop", "seed", "policy", "policy_options", "extra")
        return {name: getattr(self, name) for name in names}

    @property
    def _calls(self) -> Caller:
        if self._caller is None:
            self._caller = Caller(EngineHandle(self.engine), ParserNames(self.tool_parser, self.reasoning_parser))
        return self._caller


def _result(message: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])
