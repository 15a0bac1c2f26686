"""A chat model on a real engine whose replies are forced by a grammar: prompts, tokens, KV and parsing are all real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
from pydantic import PrivateAttr

from agentcache import AgentCache, RecoveryReport, RevisionKind
from agentcache.integrations.langchain import ChatAgentCache
from agentcache.integrations.langchain.calls import Caller
from agentcache.integrations.langchain.engine import EngineHandle
from agentcache.integrations.langchain.families import ParserNames
from agentcache.integrations.langchain.runs import run_of

__all__ = ["FREE", "Call", "Scripted", "call_text", "only", "plain"]

FREE: dict[str, Any] = {"max_tokens": 6, "extra": {"ignore_eos": True}}
"""A reply that nothing forces."""


def call_text(*calls: tuple[str, dict[str, Any]]) -> str:
    """The text of tool calls, as Qwen writes it."""
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written)


@dataclass
class Call:
    """One request that the engine has answered, and what the tracker and the report say of it."""

    chat: list[dict[str, Any]]
    options: dict[str, Any]
    report: dict[str, Any]
    text: str
    old_ids: list[int]
    ids: list[int]
    reply: list[int]

    @property
    def kind(self) -> RevisionKind:
        return RevisionKind(self.report["kind"])

    @property
    def tokens(self) -> RecoveryReport:
        return RecoveryReport.model_validate(self.report)

    @property
    def shared_prefix(self) -> int:
        """Tokens until the prompt and its parent, with the parent's reply, first differ."""
        size = min(len(self.old_ids), len(self.ids))
        differs = np.flatnonzero(np.array(self.old_ids[:size]) != np.array(self.ids[:size]))
        return int(differs[0]) if differs.size else size

    @property
    def longest_shared(self) -> int:
        """Tokens of the longest passage that stands in both, behind that."""
        old, new = np.array(self.old_ids[self.shared_prefix :]), np.array(self.ids[self.shared_prefix :])
        best, run = 0, np.zeros(len(new) + 1, int)
        for token in old:
            run[1:] = np.where(new == token, run[:-1] + 1, 0)
            best = max(best, int(run.max()))
        return best


def plain(engine: AgentCache, call: Call) -> list[int]:
    """What vLLM alone answers to a call's prompt, with nothing of its caches."""
    options = {"max_tokens": call.options["max_tokens"], "extra": call.options["extra"]}
    reply = engine.generate(call.ids, salt=f"plain {call.report['version']}", **options)
    assert reply.cached_tokens == 0
    return reply.token_ids


class _NotingCaller(Caller):
    """Keeps what becomes of each call."""

    done: list[Call]

    def message(self, call: Any, reply: Any) -> Any:
        message = super().message(call, reply)
        tracker = self.engine.cache._session.tracker
        version = tracker.version(reply.version) if reply.version else None
        parent = tracker.version(version.parent) if version is not None and version.parent else None
        old = parent.context_ids.tolist() if parent is not None else []
        ids = version.token_ids.tolist() if version is not None else []
        report = message.response_metadata["agentcache"]
        self.done.append(Call(call.chat, call.options, report, reply.text, old, ids, reply.token_ids))
        return message


class Scripted(ChatAgentCache):
    """Says the next of `script`: a text, tool calls as `[(name, arguments)]`, or None for what it likes. After it, it is free.

    Calls that a middleware makes for itself have a script of their own.
    """

    _script: list[Any] = PrivateAttr(default_factory=list)
    _aside: list[Any] = PrivateAttr(default_factory=list)
    _thread: str = PrivateAttr(default_factory=lambda: uuid4().hex)

    @classmethod
    def on(cls, cache: AgentCache, *script: Any, aside: Sequence[Any] = (), **options: Any) -> Scripted:
        model = cls(cache=cache, **options)
        model._script, model._aside = list(script), list(aside)
        model._caller = _NotingCaller(EngineHandle(cache), ParserNames(None, None))
        model._caller.done = []
        return model

    @property
    def thread(self) -> str:
        """A thread of its own."""
        return self._thread

    @property
    def calls(self) -> list[Call]:
        """The calls of episodes."""
        return [call for call in self._caller.done if call.report["episode"] is not None]

    @property
    def aside(self) -> list[Call]:
        """The others."""
        return [call for call in self._caller.done if call.report["episode"] is None]

    def _prepare(self, messages: Any, stop: Any, run_manager: Any, said: Any) -> Any:
        script = self._aside if run_of(run_manager).metadata.get("lc_source") else self._script
        wanted = script.pop(0) if script else None
        text = call_text(*wanted) if isinstance(wanted, list) else wanted
        forced = {"extra": only(text), "max_tokens": 256} if text is not None else FREE
        # A call that must be made is made by the script.
        tools = [
            {**t, "function": {k: v for k, v in t["function"].items() if k != "strict"}} for t in said.get("tools", ())
        ]
        said = {
            name: value for name, value in said.items() if name not in ("tools", "tool_choice", "parallel_tool_calls")
        }
        return super()._prepare(messages, stop, run_manager, {**said, **forced} | ({"tools": tools} if tools else {}))


def only(text: str) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(grammar=f"root ::= {json.dumps(text)}")}
