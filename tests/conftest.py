"""The slow tier, the real model, and the environment of every engine that a test starts.

A test module imports helpers that tests share with `from tests.NAME import …`; pytest puts no folder on sys.path.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agentcache.weights import resolve_model
from tests.ending import end_passed

# vLLM reads these when it is imported, so they are set before any test module is.
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for name, value in ENGINE_ENVIRONMENT.items():
    os.environ.setdefault(name, value)


# A shell that runs the tests in its background has them, and all that they start, ignore the interrupts that some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(trylast=True)  # behind the test's own fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    end_passed(item.config, nextitem)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct: AGENTCACHE_TEST_MODEL, else the built-in model of the cache folder."""
    folder = resolve_model(os.environ.get("AGENTCACHE_TEST_MODEL", "smollm2"))
    assert isinstance(folder, Path), f"AGENTCACHE_TEST_MODEL={folder!r} is not a folder"
    return folder
