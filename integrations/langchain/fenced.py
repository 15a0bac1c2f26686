"""A parser of tool calls for models that write them as JSON in a Markdown fence, or bare, where their template asks for tags.

Qwen2.5 and its coders do so as often as not. vLLM's `hermes` reads the tags alone and its `xlam` fenced arrays alone, so such a call
would be an answer that shows JSON to the user. This one is `hermes` over a text in which every object that names a tool that was
given, with arguments, stands between tags. Import it only after an engine has started, see `parsing`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from vllm.entrypoints.generate.base.protocol import DeltaMessage, ExtractedToolCallInformation
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

from agentcache.integrations.langchain.families import FENCED

__all__ = ["FencedToolParser", "register"]

_OPEN: Final = re.compile(r"```(?:json)?[ \t]*\n\s*(?=[{\[])|\A\s*(?=[{\[])")
_OPENS: Final = re.compile(r"`{1,2}\Z|```[a-z]*[ \t]*\n?\s*\Z")  # what may become an opening
_CLOSE: Final = re.compile(r"\s*(?:```)?")
_CLOSED: Final = re.compile(r"\n[ \t]*```")
_BEGINS: Final = re.compile(r'[\[\s]*(?:\{\s*(?:"(?P<key>[^"]*)(?P<end>")?.*)?)?\Z', re.DOTALL)
_ARGUMENTS: Final = ("arguments", "parameters")
_decoder: Final = json.JSONDecoder()


def register() -> None:
    """Makes vLLM know the parser, under `families.FENCED`."""
    if FENCED not in ToolParserManager.list_registered():
        ToolParserManager.register_module(FENCED, module=FencedToolParser)


class FencedToolParser(Hermes2ProToolParser):
    """`hermes`, which also reads calls in fences and bare ones.

    Attributes:
        ended: Whether a stream has ended: what was held back as a beginning of a call then is text.
    """

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None) -> None:
        super().__init__(tokenizer, tools)
        self.ended = False
        self._names = {getattr(tool, "function", tool).name for tool in self.tools}

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        """Returns the calls of a whole reply, and the text before the first."""
        found = super().extract_tool_calls(self._tagged(model_output, ended=True), request)
        return found if found.tools_called else found.model_copy(update={"content": model_output})

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        """Returns what is new in a stream. A call in a fence comes in one piece, once its JSON is whole."""
        tagged = self._tagged(current_text, ended=self.ended)
        return super().extract_tool_calls_streaming(
            previous_text, tagged, delta_text, previous_token_ids, current_token_ids, delta_token_ids, request
        )

    def _tagged(self, text: str, *, ended: bool) -> str:
        """Returns a text with its calls between tags, and without its end where that may become a call."""
        out, at = list[str](), 0
        for opening in _OPEN.finditer(text):
            if opening.start() < at:  # in a string of a call
                continue
            try:
                value, end = _decoder.raw_decode(text, opening.end())
            except json.JSONDecodeError:
                if not ended and self._may_become_a_call(text[opening.end() :]):
                    return "".join([*out, text[at : opening.start()]])
                continue
            if calls := list(self._calls(value)):
                out.append(text[at : opening.start()])
                out += [f"{self.tool_call_start_token}\n{call}\n{self.tool_call_end_token}" for call in calls]
                closing = _CLOSE.match(text, end)
                assert closing is not None  # it matches nothing, too
                at = closing.end()
        rest = text[at:]
        if not ended and (held := _OPENS.search(rest)):
            rest = rest[: held.start()]
        return "".join([*out, rest])

    def _calls(self, value: Any) -> Iterator[str]:
        """Yields the calls that a JSON value is, each as JSON; none where a part of it is something else."""
        parts = value if isinstance(value, list) else [value]
        known = [
            part
            for part in parts
            if isinstance(part, dict) and part.get("name") in self._names and self._arguments(part) is not None
        ]
        if len(known) == len(parts):
            for part in known:
                yield json.dumps({"name": part["name"], "arguments": self._arguments(part)}, ensure_ascii=False)

    @staticmethod
    def _arguments(part: dict[str, Any]) -> dict[str, Any] | None:
        found = [part[name] for name in _ARGUMENTS if isinstance(part.get(name), dict)]
        return found[0] if found else None

    @staticmethod
    def _may_become_a_call(text: str) -> bool:
        """Whether JSON that is not whole yet, or none, can turn out to be a call."""
        begins = _BEGINS.match(text)
        if begins is None or _CLOSED.search(text):
            return False
        key, whole = begins["key"], begins["end"]
        return key is None or any(name == key if whole else name.startswith(key) for name in ("name", *_ARGUMENTS))
