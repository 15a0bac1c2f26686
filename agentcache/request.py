"""What a caller may say about one request, validated once. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentcache.config import Precision
from agentcache.engine.wire import MOST_SOURCES, Name
from agentcache.errors import ConfigError

__all__ = ["GenerateOptions", "Messages", "RequestOptions"]

Messages: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Chat messages, one user message, or token ids."""

REFUSED = {
    "n": "a version is one continuation; call generate once for each",
    "prompt_logprobs": "vLLM then computes the whole prompt and nothing can be recovered",
    "prompt_logprob_token_ids": "vLLM then computes the whole prompt and nothing can be recovered",
    "prompt_logprob_start": "vLLM then computes the whole prompt and nothing can be recovered",
    "output_kind": "generate and stream choose it",
    "stream_interval": "generate and stream choose it",
    "skip_clone": "it is vLLM's own",
}
"""Sampling parameters that `extra` may not hold, and why."""


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate` and `stream`; see `RequestOptions`."""

    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: str | list[str] | None
    logprobs: int | None
    policy: str | None
    policy_options: Mapping[str, Any] | None
    parent: str | None
    sources: Sequence[str]
    save: bool
    precision: str | None
    timeout: float | None
    tools: Sequence[Mapping[str, Any]] | None
    attributes: Mapping[str, Any] | None
    salt: str
    extra: Mapping[str, Any] | None


class RequestOptions(BaseModel):
    """What a caller may say about one request.

    Attributes:
        max_tokens: Most tokens to generate; None: until the model's length.
        temperature: 0 is greedy.
        top_p: Probability mass that is sampled from.
        seed: Of the sampling.
        stop: Strings that end the reply; they are not part of it.
        logprobs: Log-probabilities a token; -1 for the whole vocabulary.
        policy: Recovery policy; None takes the cache's.
        policy_options: The policy's own settings; None takes the cache's when the policy is the cache's too.
        parent: Version to recover from; None takes the episode's head.
        sources: Chunks (`encode_chunk`) and further versions that a lossy policy may take rows from, wherever their text stands in
            the prompt.
        save: Whether the version's KV is checkpointed when it ends.
        precision: How the version's new rows are stored, see `ConnectorConfig.precision`; None: as the cache is set.
        timeout: Seconds until the request is aborted and `RequestTimeout` is raised.
        tools: Tool schemas for the chat template.
        attributes: Free values kept with the version, e.g. a framework's checkpoint id.
        salt: Keeps approximate blocks of this request to itself, e.g. those of a benchmark's repetition. Outside of an episode
            it is vLLM's `cache_salt`.
        extra: Further fields of vLLM's `SamplingParams`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: Annotated[int, Field(ge=1)] | None = 256
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: Annotated[int, Field(ge=-1)] | None = None
    policy: str | None = None
    policy_options: dict[str, int | float | str | bool | None] | None = None
    parent: Name | None = None
    sources: list[Name] = Field(default_factory=list, max_length=MOST_SOURCES)
    save: bool = True
    precision: Precision | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    tools: list[dict[str, Any]] | None = None
    attributes: dict[str, Any] | None = None
    salt: str = Field(default="", max_length=256)
    extra: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def build(cls, options: Mapping[str, Any]) -> RequestOptions:
        """Returns validated options.

        Raises:
            ConfigError: One is unknown, out of range or refused; names it, its value and what is allowed.
        """
        for name, value in options.items():
            if name in REFUSED:
                raise ConfigError(f"{name}={value!r} is not supported: {REFUSED[name]}")
            if name not in cls.model_fields:
                raise ConfigError(
                    f"unknown option {name}={value!r}; there are {', '.join(cls.model_fields)}. Further fields of vLLM's "
                    f"SamplingParams go into extra={{{name!r}: ...}}"
                )
        try:
            built = cls.model_validate({k: v for k, v in options.items() if k != "extra" or v is not None})
        except ValidationError as error:
            lines = [
                f"{'.'.join(str(p) for p in e['loc'] if isinstance(p, (str, int)))}={e.get('input')!r}: {e['msg']}"
                for e in error.errors()
            ]
            raise ConfigError("this request is not allowed:\n  " + "\n  ".join(lines)) from error
        for name in built.extra:
            if name in cls.model_fields:
                raise ConfigError(f"extra may not hold {name!r}: give it as an argument of its own")
            if name in REFUSED:
                raise ConfigError(f"extra: {name}={built.extra[name]!r} is not supported: {REFUSED[name]}")
        return built

    def refuse_recovery(self) -> None:
        """Raises ConfigError when an option needs an episode; for requests outside of one."""
        defaults = RequestOptions()
        for name in ("policy", "policy_options", "parent", "sources", "save", "precision", "attributes"):
            value = getattr(self, name)
            if value != getattr(defaults, name):
                raise ConfigError(f"{name}={value!r} needs an episode: call cache.episode(id).generate(...)")
