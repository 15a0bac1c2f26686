"""A parser of tool calls for models that write them as JSON in a Markdown fence, or bare, where their template asks for tags.

Qwen2.5 and its coders do so as often as not. vLLM's `hermes` reads the tags alone and its `xlam` fenced arrays alone, so such a call
would be an answer that shows JSON to the user. This one is `hermes` over a text in which each such call of a tool that was given
stands between tags: an object of `name` and `arguments` alone, or a list of them, at the reply's start or at that of a fence. Import
it only after an engine has started, see `parsing`.
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

_FENCE: Final = "```"
_HEAD: Final = re.compile(r"(\w*)[ \t]*\n\s*")  # of a fence: its language and the end of the line
_PART_OF_HEAD: Final = re.compile(r"\w*[ \t]*")
_LANGUAGES: Final = ("", "json")
_CLOSE: Final = re.compile(r"\s*(?:```(?!\w)(?:\s*</tool_call>)?)?")
_TAG: Final = re.compile(r"<tool_call>\s*\Z")
_TICKS: Final = re.compile(r"`{1,2}\Z")
_BEGINS: Final = re.compile(
    r'\[?\s*(?:\{\s*(?:"(?P<key>[^"]*)(?P<key_end>")?(?:\s*:\s*"(?P<name>[^"]*)(?P<name_end>")?)?.*)?)?\Z', re.DOTALL
)
_KEYS: Final = ("name", "arguments")  # in the order in which `hermes` reads them
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
        self._sent_content_idx: int = 0  # of `hermes`
        self._names: list[str] = [getattr(tool, "function", tool).name for tool in self.tools]

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
        found = super().extract_tool_calls_streaming(
            previous_text, tagged, delta_text, previous_token_ids, current_token_ids, delta_token_ids, request
        )
        if self.ended and self.tool_call_start_token not in tagged and len(tagged) > self._sent_content_idx:
            # `hermes` waits for the rest of what may be a tag.
            content = (found.content or "" if found else "") + tagged[self._sent_content_idx :]
            self._sent_content_idx = len(tagged)
            return DeltaMessage(content=content)
        return found

    def _tagged(self, text: str, *, ended: bool) -> str:
        """Returns a text with its calls between tags, and without its end where that may become a call."""
        start = len(text) - len(text.lstrip())
        if start == len(text):
            return text if ended else ""
        out, at, scan = list[str](), 0, 0
        if text[start] in "{[":
            found = self._calls_at(text, start, ended=ended)
            if found is None:
                return ""
            calls, end = found
            if calls:
                out, at, scan = calls, end, end
        while (fence := text.find(_FENCE, scan)) >= 0:
            behind = fence + len(_FENCE)
            head = _HEAD.match(text, behind)
            tag = _TAG.search(text, at, fence)
            begin = tag.start() if tag else fence
            found = None
            if head is not None and head[1] in _LANGUAGES:
                found = self._calls_at(text, head.end(), ended=ended)
            elif head is not None or ended or not _PART_OF_HEAD.fullmatch(text, behind):
                found = [], behind
            if found is None:
                return "".join([*out, text[at:begin]])
            calls, end = found
            if calls:
                closing = _CLOSE.match(text, end)
                assert closing is not None  # it matches nothing, too
                out += [text[at:begin], *calls]
                at = scan = closing.end()
            else:
                closes = text.find(_FENCE, behind)
                if closes < 0:
                    return "".join([*out, text[at:]])
                scan = closes + len(_FENCE)
        held = None if ended else _TICKS.search(text, scan)
        return "".join([*out, text[at : held.start() if held else None]])

    def _calls_at(self, text: str, at: int, *, ended: bool) -> tuple[list[str], int] | None:
        """Returns the calls, tagged, that stand one after another from a place on, and their end; None: it is too early to tell."""
        calls, end = list[str](), at
        while True:
            begin = end + len(text[end:]) - len(text[end:].lstrip())
            if begin == len(text):
                return None if not (ended or calls) else (calls, end)
            if text[begin] not in "{[":
                return calls, end
            try:
                value, behind = _decoder.raw_decode(text, begin)
            except (ValueError, RecursionError):  # also numbers that are too long, and lists that are too deep
                return None if not (ended or calls) and self._may_become_a_call(text[begin:]) else (calls, end)
            if not (more := list(self._calls(value))):
                return calls, end
            calls, end = [*calls, *more], behind

    def _calls(self, value: Any) -> Iterator[str]:
        """Yields the calls that a JSON value is, each between tags; none where a part of it is something else."""
        parts = value if isinstance(value, list) else [value]
        if all(isinstance(part, dict) and self._is_call(part) for part in parts):
            for part in parts:
                # A tag inside of an argument would end the call.
                call = json.dumps({key: part[key] for key in _KEYS}, ensure_ascii=False).replace("<", "\\u003c")
                yield f"{self.tool_call_start_token}\n{call}\n{self.tool_call_end_token}"

    def _is_call(self, part: dict[str, Any]) -> bool:
        """Whether an object is a call, and neither a tool's description nor any other that has a name."""
        return part.keys() == {*_KEYS} and isinstance(part["arguments"], dict) and part["name"] in self._names

    def _may_become_a_call(self, text: str) -> bool:
        """Whether JSON that is not whole yet, or none, can turn out to be a call."""
        begins = _BEGINS.match(text)
        if begins is None:
            return False
        key, name = begins["key"], begins["name"]
        if key is None:
            return True
        if not any(known == key if begins["key_end"] else known.startswith(key) for known in _KEYS):
            return False
        if key != "name" or name is None:
            return True
        return any(known == name if begins["name_end"] else known.startswith(name) for known in self._names)
