"""A model's chat template: how it is called, which form of tool calls it takes, and what it writes around messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from agentcache.episodes.messages import ChatMessage, Tool, normalise_messages
from agentcache.episodes.pieces import ChatTokenizer
from agentcache.errors import RenderError

__all__ = ["Template", "TemplateCall"]

# Small chats: their last words are this one.
_WORD: Final = "Mark"
_CALL: Final = {"id": "call00000", "type": "function", "function": {"name": _WORD, "arguments": {}}}
_USER: Final[Mapping[str, Any]] = {"role": "user", "content": _WORD}
_ASKED: Final[Mapping[str, Any]] = {"role": "user", "content": "."}
_REPLY: Final[Mapping[str, Any]] = {"role": "assistant", "content": _WORD}
_CALLS: Final[Mapping[str, Any]] = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_RESULT: Final[Mapping[str, Any]] = {"role": "tool", "content": _WORD, "tool_call_id": "call00000", "name": "."}
_CUT: Final = "{" + _WORD  # arguments that are no JSON


@dataclass(frozen=True, slots=True)
class TemplateCall:
    """What a template gets besides the messages."""

    tools: list[Tool] | None = None
    now: datetime | None = None
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class _Dialect:
    """The form of tool calls: a missing content as text or None, arguments as values or as JSON text.

    Attributes:
        missing: What stands for no content.
        json_arguments: Whether arguments are JSON text.
        any_text: Whether they may also be other text: what a model wrote that is no JSON.
    """

    missing: str | None = ""
    json_arguments: bool = False
    any_text: bool = True


class Template:
    """The chat template of a tokenizer.

    Templates differ in how a message with tool calls must look (some concatenate its content, some test it for None;
    some want arguments as JSON text, some iterate over them), so the form that shows the calls is learned once. Arguments that a model
    wrote as no JSON object, e.g. because a limit cut them, are one argument of the name `arguments` where a template takes no text.

    Args:
        tokenizer: Applies the template.
        variables: Further variables of the template.

    Attributes:
        generation_prompt: What the template adds for the assistant's turn.
        samples: Small chats without that, rendered.
        endings: What follows the last words in them: it ends a turn.

    Raises:
        RenderError: It does not even render one user message.
    """

    def __init__(self, tokenizer: ChatTokenizer, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._dialect = _Dialect()
        closed = self.text(self.values([_USER]), TemplateCall(add_generation_prompt=False))
        opened = self.text(self.values([_USER]), TemplateCall())
        self.generation_prompt = opened.removeprefix(closed) if opened.startswith(closed) else ""
        self._dialect = self._learn_dialect()
        chats = ([_ASKED, _REPLY], [_ASKED, _CALLS], [_ASKED, _CALLS, _RESULT])
        self.samples = [closed, *filter(None, map(self._closed, chats))]
        self.endings = [text.rpartition(_WORD)[2] for text in self.samples if _WORD in text]

    def values(self, messages: Sequence[Mapping[str, Any]] | Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Returns messages in the form that the template takes."""
        chat = [m if isinstance(m, ChatMessage) else normalise_messages([m])[0] for m in messages]
        return [self._values(message) for message in chat]

    def text(self, values: list[dict[str, Any]], call: TemplateCall) -> str:
        """Returns the rendered messages.

        Raises:
            RenderError: The template fails; says what to do.
        """
        # A context variable hides the global function of this name, so the date that a template prints is the caller's.
        variables = {**self._variables, "strftime_now": call.now.strftime} if call.now else self._variables
        try:
            text = self._tokenizer.apply_chat_template(
                values,
                tools=call.tools,
                tokenize=False,
                add_generation_prompt=call.add_generation_prompt,
                **variables,
            )
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in values[:8]) + (", …" if len(values) > 8 else "")
            raise RenderError(
                f"the model's chat template does not render these messages ({roles}): {error}; "
                "change the messages as it asks, or give the tokenizer a chat_template that takes them"
            ) from error
        return str(text)

    def attempt(self, values: list[dict[str, Any]], call: TemplateCall) -> str | None:
        """Returns the rendered messages, or None when the template refuses them: for what is tried, not asked for."""
        try:
            return self.text(values, call)
        except RenderError:
            return None

    def _closed(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        return self.attempt(self.values(messages), TemplateCall(add_generation_prompt=False))

    def _learn_dialect(self) -> _Dialect:
        """Returns the first form of tool calls that the template shows, or the plainest when it shows none."""
        for dialect in (_Dialect(missing, as_json) for as_json in (False, True) for missing in ("", None)):
            self._dialect = dialect
            text = self._closed([_ASKED, _CALLS])
            if text is not None and _WORD in text:
                cut = {**_CALL, "function": {"name": ".", "arguments": _CUT}}
                shown = self._closed([_ASKED, {**_CALLS, "tool_calls": [cut]}])
                return replace(dialect, any_text=shown is not None and _CUT in shown)
        return _Dialect()

    def _values(self, message: ChatMessage) -> dict[str, Any]:
        calls = message.values.get("tool_calls")
        missing = self._dialect.missing if calls else ""
        values = {**message.values, "content": missing if message.content is None else message.content}
        if calls and (self._dialect.json_arguments or not self._dialect.any_text):
            values["tool_calls"] = [{**call, "function": self._function(call["function"])} for call in calls]
        return values

    def _function(self, function: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a called function with its arguments in the form that the template takes."""
        arguments = function["arguments"]
        if isinstance(arguments, str) and not self._dialect.any_text:
            arguments = {"arguments": arguments}
        if not isinstance(arguments, str) and self._dialect.json_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**function, "arguments": arguments}
