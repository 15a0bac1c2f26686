"""The public surface: what `agentcache` offers, and that looking at it costs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import agentcache

NAMES = [
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


def test_public_names_are_pinned() -> None:
    assert agentcache.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(getattr(agentcache, name), "__name__", name) == name
    assert name in dir(agentcache)


def test_every_error_of_the_package_is_public() -> None:
    from agentcache import errors

    assert set(errors.__all__) <= set(agentcache.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        agentcache.nope  # noqa: B018


def test_all_public_names_load_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, agentcache\n"
        "for name in agentcache.__all__: getattr(agentcache, name)\n"
        "heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_importing_the_package_alone_loads_none_of_its_modules() -> None:
    code = "import sys, agentcache; print([m for m in sys.modules if m.startswith('agentcache.')])"
    out = subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"
