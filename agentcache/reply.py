"""What a request gives back: the reply, its stream of chunks, and its recovery report in one line. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentcache.engine.wire import Recovery
from agentcache.types import RevisionKind

__all__ = ["FinishReason", "RecoveryReport", "Reply", "StreamChunk", "VersionRecord"]

FinishReason = Literal["stop", "length", "abort"]


class RecoveryReport(Recovery):
    """How a request's KV came to be; `str()` gives one line."""

    def __str__(self) -> str:
        share = f" ({100 * self.reused_tokens / self.prompt_tokens:.0f} % reused)" if self.reused_tokens else ""
        tokens = (
            f"P {self.prefix_tokens} | X {self.fresh_tokens} | R {self.repair_tokens} | F {self.reused_tokens}{share} | "
            f"N {self.new_tokens}"
        )
        stages = (
            ("diff", self.diff_ms),
            ("plan", self.plan_ms),
            ("restore", self.restore_ms),
            ("select", self.select_ms),
            ("recompute", self.recompute_ms),
            ("TTFT", self.ttft_ms),
        )
        parts = [f"{self.policy}: {tokens}", *(f"{name} {_milliseconds(ms)}" for name, ms in stages if ms)]
        if self.reason is not None:
            asked = f"{self.requested_policy} was asked for; " if self.requested_policy != self.policy else ""
            parts.append(f"{asked}{self.reason}")
        return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of one request.

    Attributes:
        text: The generated text.
        token_ids: The generated token ids.
        finish_reason: `stop` (end of turn or a stop string), `length` (`max_tokens`) or `abort` (ended by the engine).
        prompt_tokens: Length of the prompt.
        cached_tokens: Of them, those that the engine did not compute: its own prefix cache and what was recovered.
        ttft_ms: From the call with rendered ids (diff and plan are inside) to the first token in the caller.
        version: Id of the version that the request created; None outside of an episode.
        parent: Id of the version that it was recovered from.
        recovery: How its KV came to be; None outside of an episode.
        logprobs: A generated token's log-probabilities by token id, when they were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    version: str | None = None
    parent: str | None = None
    recovery: RecoveryReport | None = None
    logprobs: list[Mapping[int, float]] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """Newly generated tokens; the last chunk of a stream also carries the whole reply.

    Attributes:
        text: New text; may be empty while a character is incomplete.
        token_ids: New token ids.
        reply: The whole reply in the last chunk, None before.
    """

    text: str
    token_ids: list[int]
    reply: Reply | None = None


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version of an episode's history.

    Attributes:
        version: Its id.
        parent: The version that it was compared with; None for a first one.
        kind: Why it differs from that.
        prompt_tokens: Length of the prompt.
        reply_tokens: Length of the reply; 0 while there is none.
        recovery: How its KV came to be (tokens P, X, R, F); None while there is no reply.
        attributes: What the caller keeps with it.
        created_s: When, in seconds since the epoch.
    """

    version: str
    parent: str | None
    kind: RevisionKind
    prompt_tokens: int
    reply_tokens: int
    recovery: RecoveryReport | None
    attributes: Mapping[str, Any]
    created_s: float


def _milliseconds(value: float) -> str:
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"
