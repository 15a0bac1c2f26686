"""KV-cache recovery for agents that edit their own prompts, on an embedded vLLM.

Importing this package loads neither torch nor vLLM; the names below are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentcache.cache import AgentCache, Episode
    from agentcache.config import CacheConfig
    from agentcache.engine.embedded import AsyncAgentCache
    from agentcache.engine.episode import AsyncEpisode
    from agentcache.errors import (
        AgentCacheError,
        ConfigError,
        EngineDeadError,
        RenderError,
        RequestError,
        RequestTimeout,
        SelfCheckError,
        StoreError,
        UnknownVersionError,
        UnsupportedModelError,
    )
    from agentcache.events import KVPaused, KVResumed, PolicyFellBack, PromptRevised, QualityChecked, ReplyEnded
    from agentcache.reply import RecoveryReport, Reply, StreamChunk, VersionRecord
    from agentcache.report.table import ResumeTable
    from agentcache.types import RevisionKind

    __version__: str

__all__ = [
    "AgentCache",
    "AgentCacheError",
    "AsyncAgentCache",
    "AsyncEpisode",
    "CacheConfig",
    "ConfigError",
    "EngineDeadError",
    "Episode",
    "KVPaused",
    "KVResumed",
    "PolicyFellBack",
    "PromptRevised",
    "QualityChecked",
    "RecoveryReport",
    "RenderError",
    "Reply",
    "ReplyEnded",
    "RequestError",
    "RequestTimeout",
    "ResumeTable",
    "RevisionKind",
    "SelfCheckError",
    "StoreError",
    "StreamChunk",
    "UnknownVersionError",
    "UnsupportedModelError",
    "VersionRecord",
    "__version__",
]

_HOME = {
    "AgentCache": "cache",
    "AsyncAgentCache": "engine.embedded",
    "AsyncEpisode": "engine.episode",
    "CacheConfig": "config",
    "Episode": "cache",
    "KVPaused": "events",
    "KVResumed": "events",
    "PolicyFellBack": "events",
    "PromptRevised": "events",
    "QualityChecked": "events",
    "RecoveryReport": "reply",
    "Reply": "reply",
    "ReplyEnded": "events",
    "ResumeTable": "report.table",
    "RevisionKind": "types",
    "StreamChunk": "reply",
    "VersionRecord": "reply",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("agentcache-kv")
    if name not in __all__:
        raise AttributeError(f"module 'agentcache' has no attribute {name!r}")
    value = getattr(import_module(f"agentcache.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
