"""Chat messages as templates want them: flat text, arguments as values, a stable order, and a hash of what is said."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Any

from agentcache.errors import RenderError

__all__ = [
    "ArgumentOrder",
    "ChatMessage",
    "KnownMessages",
    "Tool",
    "canonical",
    "content_hash",
    "normalise_messages",
    "sort_tools",
]

Tool = Mapping[str, Any] | Callable[..., Any]
ArgumentOrder = Callable[[str, dict[str, Any]], dict[str, Any]]
_OURS = ("id", "tags")  # keys that templates never see
_KNOWN_CHARACTERS = 8 << 20
_OVERHEAD = 512  # of a message beside its content, about: those without one have an end too
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=str)  # `json.dumps` makes one a call


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message, normalised.

    Attributes:
        role: As given.
        content: Flat text, or None when it has none.
        values: What the template gets.
        content_hash: Hex digest of everything in `values`.
        message_id: The tool call's id of a tool result, else the framework's id.
        tags: Labels of the integration.
    """

    role: str
    content: str | None
    values: dict[str, Any]
    content_hash: str
    message_id: str | None
    tags: tuple[str, ...]


class KnownMessages:
    """Messages that are text alone, each normalised once: most of a long history. Thread-safe; bounded in characters."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, ...], ChatMessage] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def __call__(self, index: int, message: Mapping[str, Any], order: ArgumentOrder) -> ChatMessage:
        """Returns a message, normalised."""
        if not all(isinstance(value, str) for value in message.values()):
            return _normalise(index, message, order)
        key = tuple(message.items())
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _normalise(index, message, order)
                self._characters += _size(known)
                while self._characters > _KNOWN_CHARACTERS:
                    self._characters -= _size(self._known.popitem(last=False)[1])
            else:
                self._known.move_to_end(key)
        return known


def _size(message: ChatMessage) -> int:
    return len(message.content or "") + _OVERHEAD


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], order: ArgumentOrder | None = None, known: KnownMessages | None = None
) -> list[ChatMessage]:
    """Returns messages with flat content and tool calls whose arguments are values in sorted order.

    Args:
        messages: Dicts with `role`, `content` (text, a list of text blocks, or None) and whatever else the template
            knows: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`. `id` and `tags` are ours.
        order: Returns the arguments of a function, by name, in the order to render; None: sorted.
        known: Those that were normalised before.

    Raises:
        RenderError: A message has no role, or content that is not text.
    """
    if not messages:
        raise RenderError("there are no messages to render; pass at least one")
    make = known or _normalise
    return [make(index, message, order or _sorted) for index, message in enumerate(messages)]


def sort_tools(tools: Iterable[Tool]) -> list[Tool]:
    """Returns tools by name: frameworks list them in another order each run, which would change the whole prompt."""
    return sorted(tools, key=_tool_name)


def canonical(value: Any) -> str:
    """Returns the JSON form in which equal values are equal text."""
    return _ENCODER.encode(value)


def content_hash(values: Mapping[str, Any]) -> str:
    """Returns the hex digest of a message's template values."""
    return blake2b(canonical(values).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _sorted(_name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(canonical(arguments)))


def _normalise(index: int, message: Mapping[str, Any], order: ArgumentOrder) -> ChatMessage:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RenderError(
            f"message {index} has role {role!r}; every message needs one: system, user, assistant or tool"
        )
    values = {key: value for key, value in message.items() if key not in _OURS and value is not None}
    values["content"] = content = _flatten(index, message.get("content"))
    if "tool_calls" in values:
        values["tool_calls"] = [_tool_call(index, call, order) for call in values["tool_calls"]]
        if not values["tool_calls"]:
            del values["tool_calls"]
    own_id = message.get("tool_call_id") if role == "tool" else None
    message_id = own_id or message.get("id")
    return ChatMessage(
        role=role,
        content=content,
        values=values,
        content_hash=content_hash(values),
        message_id=None if message_id is None else str(message_id),
        tags=tuple(str(tag) for tag in message.get("tags") or ()),
    )


def _flatten(index: int, content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [block if isinstance(block, str) else _block_text(block) for block in content]
        if all(text is not None for text in texts):
            return "\n".join(text for text in texts if text is not None)
    raise RenderError(f"message {index} has content that is not text: {content!r:.200}; pass a string or text blocks")


def _block_text(block: Any) -> str | None:
    if isinstance(block, Mapping) and block.get("type", "text") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    return None


def _tool_call(index: int, call: Any, order: ArgumentOrder) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RenderError(f"message {index} has a tool call without a function name: {call!r:.200}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model may write broken JSON: such arguments stay the text that they are.
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif arguments is None:
        arguments = {}
    if isinstance(arguments, Mapping):
        arguments = order(function["name"], dict(arguments))
    rest = {key: value for key, value in call.items() if key != "function"} if "function" in call else {}
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def _tool_name(tool: Tool) -> str:
    if not isinstance(tool, Mapping):
        return str(getattr(tool, "__name__", tool))
    return str(tool.get("function", tool).get("name", ""))
