"""Every error that agentcache raises on purpose.

```
AgentCacheError
├── ConfigError            a setting, policy name or argument is not allowed (also a ValueError)
├── RenderError            messages cannot be turned into tokens by the model's chat template
├── UnknownVersionError    an episode has no such version (also a KeyError)
├── UnsupportedModelError  the model cannot be recovered exactly; `reasons` lists why
├── SelfCheckError         a claim about the engine did not hold when it was checked at start-up
├── EngineDeadError        the vLLM engine has died; `cache.restart()` starts a new one
├── RequestError           one request failed in the engine
│   └── RequestTimeout     it took longer than its `timeout` (also a TimeoutError)
└── StoreError             a checkpoint store cannot be opened or is inconsistent
```

A miss, a refusal and a lost block are no errors: the request is served exactly and `Recovery.reason` says why.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AgentCacheError",
    "ConfigError",
    "EngineDeadError",
    "RenderError",
    "RequestError",
    "RequestTimeout",
    "SelfCheckError",
    "StoreError",
    "UnknownVersionError",
    "UnsupportedModelError",
]


class AgentCacheError(Exception):
    """The base of every error of this package."""


class ConfigError(AgentCacheError, ValueError):
    """A setting, policy name or argument is not allowed."""


class RenderError(AgentCacheError):
    """Messages cannot be turned into tokens by the model's chat template."""


class UnknownVersionError(AgentCacheError, KeyError):
    """An episode has no such version."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "unknown version"


class UnsupportedModelError(AgentCacheError):
    """The model's KV cannot be recovered by this release.

    Attributes:
        reasons: One sentence a reason.
    """

    def __init__(self, model: str, reasons: Iterable[str]) -> None:
        self.model = model
        self.reasons = tuple(reasons)
        listed = "\n".join(f"  - {reason}" for reason in self.reasons)
        super().__init__(
            f"agentcache cannot recover the KV of {model}:\n{listed}\n"
            "Use a decoder-only model with full attention in every layer, or run it with vLLM alone."
        )


class SelfCheckError(AgentCacheError):
    """A claim about the engine did not hold when it was checked at start-up."""


class EngineDeadError(AgentCacheError):
    """The vLLM engine has died; `cache.restart()` starts a new one."""


class RequestError(AgentCacheError):
    """One request failed in the engine."""


class RequestTimeout(RequestError, TimeoutError):
    """A request took longer than its `timeout`; it was aborted in the engine."""


class StoreError(AgentCacheError):
    """A checkpoint store cannot be opened or is inconsistent."""
