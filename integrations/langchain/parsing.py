"""What a model writes, taken apart by vLLM's own parsers: content, reasoning and tool calls.

Import it only after an engine has started, which imports vLLM quietly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.parser.abstract_parser import Parser
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import get_tool_call_id_type, make_tool_call_id
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager

from agentcache.errors import ConfigError
from agentcache.integrations.langchain.families import NONE, ParserNames
from agentcache.integrations.langchain.fenced import FencedToolParser, register
from agentcache.integrations.langchain.forms import CallPart, Parsed, Wanted
from agentcache.integrations.langchain.grammar import BACKENDS, tightened

__all__ = ["OutputParsers", "RequestParser"]

_ID_TYPE_WITH_HISTORY: Final = "kimi_k2"


class OutputParsers:
    """The parsers of one model.

    Args:
        names: vLLM's names of them.
        tokenizer: The model's.
        model_config: vLLM's.
        prompt_end: Gives the ids that every prompt ends with: a template may open the reasoning there.
        grammar_waits: Whether the engine constrains a reply only after its reasoning.
        grammar_backend: vLLM's name of what constrains replies.
        model: Its name, for messages.

    Raises:
        ConfigError: vLLM has no parser of a name, or it does not fit the tokenizer.
    """

    def __init__(
        self,
        names: ParserNames,
        *,
        tokenizer: Any,
        model_config: Any,
        prompt_end: Callable[[], list[int]],
        grammar_waits: bool,
        grammar_backend: str,
        model: str,
    ) -> None:
        self.names = ParserNames(*(None if name == NONE else name for name in names))
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._prompt_end = prompt_end
        self._grammar_waits = grammar_waits
        self._bounds = grammar_backend in BACKENDS
        self._model = model
        self._closed: bool | None = None
        self._classes: dict[tuple[bool, str], type[Parser]] = {}
        register()
        _check("tool_parser", self.names.tool, ToolParserManager.list_registered())
        _check("reasoning_parser", self.names.reasoning, ReasoningParserManager.list_registered())

    def check_tools(self) -> None:
        """Raises ConfigError when the model has no parser of tool calls."""
        if self.names.tool is None:
            raise ConfigError(
                f"no parser is known for the tool calls of {self._model!r}; name one with tool_parser=…, one of "
                f"{', '.join(ToolParserManager.list_registered())}, or call the model without tools"
            )

    @property
    def combines(self) -> bool:
        """Whether a reply may be a tool call or follow a response format, as the model likes."""
        if self.names.tool is None:
            return True  # there are no tools
        return ToolParserManager.get_tool_parser(self.names.tool).structural_tag_model is not None

    def of(self, wanted: Wanted, chat: Sequence[Mapping[str, Any]]) -> RequestParser | None:
        """Returns the parser of one call, or None when its reply is text as it stands.

        Args:
            wanted: What the call asks for.
            chat: Its messages.

        Raises:
            ConfigError: Tools are bound and the model has no parser of them, or this parser cannot do what is asked.
        """
        if wanted.tools:
            self.check_tools()
        constrained = wanted.forced or wanted.response_format is not None
        # A grammar that holds from the first token leaves no room for reasoning.
        reasons = self.names.reasoning is not None and (not constrained or self._grammar_waits)
        if not (wanted.tools or reasons or wanted.response_format):
            return None
        both = wanted.response_format is not None and bool(wanted.tools) and wanted.choice == "auto"
        level = "function" if both else "auto"
        prompt_end = self._prompt_end() if reasons else []
        reasons = reasons and not self._is_closed(prompt_end)
        request = self._request(wanted, chat)
        parser: Parser | None = None
        if wanted.tools or reasons:
            parser = self._make(reasons, wanted, request.tools, level)
            try:
                request = parser.adjust_request(request)
            except (ValueError, VLLMClientError) as error:
                raise _refused(error) from error
        structured = request.extract_structured_outputs()
        if wanted.forced and structured is None:
            raise ConfigError(
                f"vLLM's parser {self.names.tool!r} cannot force a tool call; leave tool_choice to the model"
            )
        if both and (structured is None or structured.structural_tag is None):
            raise ConfigError(
                f"vLLM's parser {self.names.tool!r} cannot combine tools with response_format={wanted.response_format!r:.80}: "
                "the model could never call one; use a tool as response format, e.g. LangChain's ToolStrategy"
            )
        if structured is not None and self._bounds:
            structured = tightened(structured)
        return RequestParser(
            parser,
            request,
            prompt_end,
            structured,
            forced=wanted.forced,
        )

    def _is_closed(self, prompt_end: list[int]) -> bool:
        """Whether the template ends the reasoning before the reply begins, which then is all content."""
        if self._closed is None:
            self._closed = bool(self._make(True, Wanted(), None, "auto").is_reasoning_end(prompt_end))
        return self._closed

    def _make(self, reasons: bool, wanted: Wanted, tools: list[Any] | None, level: str) -> Parser:
        made = self._class(reasons, bool(wanted.tools), level)
        return made(self._tokenizer, tools, model_config=self._model_config, chat_template_kwargs={})

    def _class(self, reasons: bool, tools: bool, level: str) -> type[Parser]:
        key = (reasons, level if tools else "")
        if key not in self._classes:
            try:
                made = ParserManager.get_parser(
                    self.names.tool if tools else None,
                    self.names.reasoning if reasons else None,
                    enable_auto_tools=tools,
                    tool_strict_level=level,
                    tokenizer=self._tokenizer,
                )
            except TypeError as error:
                raise ConfigError(
                    f"vLLM's parsers {self.names} do not fit {self._model!r}: {error}; name others with tool_parser=… and "
                    "reasoning_parser=…, or 'none'"
                ) from error
            assert made is not None
            self._classes[key] = made
        return self._classes[key]

    def _request(self, wanted: Wanted, chat: Sequence[Mapping[str, Any]]) -> ChatCompletionRequest:
        fields: dict[str, Any] = {"messages": self._history(chat), "parallel_tool_calls": wanted.parallel}
        if wanted.tools:
            fields["tools"] = [_strict(tool) for tool in wanted.tools] if wanted.forced else list(wanted.tools)
            fields["tool_choice"] = wanted.choice
        if wanted.response_format is not None:
            fields["response_format"] = wanted.response_format
        try:
            return ChatCompletionRequest(**fields)
        except (ValueError, VLLMClientError) as error:
            raise _refused(error) from error

    def _history(self, chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns what a parser reads of the messages: how many calls there were, where a call's id counts them."""
        if get_tool_call_id_type(self._model_config) != _ID_TYPE_WITH_HISTORY:
            return []
        calls = [message["tool_calls"] for message in chat if message.get("tool_calls")]
        written = [
            [
                {"id": c["id"], "type": "function", "function": {"name": c["function"]["name"], "arguments": "{}"}}
                for c in turn
            ]
            for turn in calls
        ]
        return [{"role": "assistant", "content": "", "tool_calls": turn} for turn in written]


@dataclass(slots=True)
class RequestParser:
    """The parser of one reply.

    Args:
        parser: vLLM's; None: the reply is text in a fixed form.
        request: As the parser has changed it.
        prompt_end: Ids that the prompt ends with.
        structured: What constrains the reply.
        forced: Whether it is a tool call in any case.
    """

    parser: Parser | None
    request: ChatCompletionRequest
    prompt_end: list[int]
    structured: StructuredOutputsParams | None
    forced: bool
    _ids: list[int] = field(default_factory=list)

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of vLLM's `SamplingParams` that the parser needs."""
        fields: dict[str, Any] = {} if self.structured is None else {"structured_outputs": self.structured}
        if not self.request.skip_special_tokens:
            fields["skip_special_tokens"] = False
        return fields

    def parse(self, text: str, token_ids: Sequence[int], *, cut: bool = False) -> Parsed:
        """Returns a whole reply taken apart.

        Args:
            text: The reply.
            token_ids: Its ids.
            cut: Whether a limit ended it, maybe inside of a call. Parsers of whole replies take such a call for text.
        """
        if self.parser is None:
            return Parsed(text)
        if cut and self.request.tools:
            new = self.delta(text, token_ids, finished=False)
            rest = self.delta("", [], finished=True)  # it also closes what the limit has cut
            if self.forced and not new.calls:
                return Parsed(calls=(CallPart(0, make_tool_call_id(), None, text),))
            return Parsed(new.content + rest.content, new.reasoning + rest.reasoning, _joined(new.calls))
        self._ids = list(token_ids)
        self.parser.set_prompt_token_ids(self.prompt_end)
        reasoning, content, calls = self.parser.parse(
            text, self.request, enable_auto_tools=bool(self.request.tools), model_output_token_ids=self._ids
        )
        parts = [
            CallPart(index, call.id or make_tool_call_id(), call.name, call.arguments)
            for index, call in enumerate(calls or [])
        ]
        return Parsed(content or "", reasoning or "", self._allowed(parts))

    def delta(self, text: str, token_ids: Sequence[int], *, finished: bool) -> Parsed:
        """Returns what is new in a stream, once it is clear what it is."""
        self._ids += token_ids
        if self.parser is None:
            return Parsed(text)
        if len(self._ids) == len(token_ids):
            self.parser.set_prompt_token_ids(self.prompt_end)
        if isinstance(self.parser.tool_parser, FencedToolParser):
            self.parser.tool_parser.ended = finished
        new = self.parser.parse_delta(text, list(token_ids), self.request, self.prompt_end, finished=finished)
        if new is None:
            return Parsed()
        calls = [
            CallPart(call.index, call.id, call.function.name, call.function.arguments or "")
            for call in new.tool_calls or ()
            if call.function is not None
        ]
        return Parsed(new.content or "", new.reasoning or "", self._allowed(calls))

    def _allowed(self, calls: Sequence[CallPart]) -> tuple[CallPart, ...]:
        """Returns what a reply may hold of its calls: the first, where they may not be parallel and no grammar has seen to it."""
        return tuple(call for call in calls if call.index == 0 or self.request.parallel_tool_calls is not False)

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of the tokens so far are reasoning; None where no parser of reasoning reads them."""
        if self.parser is None or self.parser.reasoning_parser is None:
            return None
        return int(self.parser.count_reasoning_tokens(self._ids))


def _joined(parts: Sequence[CallPart]) -> tuple[CallPart, ...]:
    """Returns the parts of a stream as one part a call."""
    found: dict[int, CallPart] = {}
    for part in parts:
        known = found.get(part.index, CallPart(part.index, None, None, ""))
        found[part.index] = CallPart(
            part.index, known.id or part.id, known.name or part.name, known.arguments + part.arguments
        )
    return tuple(found.values())


def _strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool whose arguments must follow its schema, unless it says otherwise: a call that is forced has to be a good one."""
    function = tool["function"]
    return {**tool, "function": {**function, "strict": function.get("strict", True)}}


def _refused(error: Exception) -> ConfigError:
    return ConfigError(f"vLLM does not accept these tools or this response format: {error}")


def _check(option: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"vLLM has no {option} {name!r}; there are {', '.join(known)}, and 'none'")
