"""One engine for this folder, and checkpointers of both kinds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver

from agentcache import AgentCache

TEMPLATE = Path(__file__).parents[1] / "templates" / "qwen2_5.jinja"


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentCache]:
    """A tiny random model with the chat template of Qwen2.5, which shows tools."""
    from tests.models import make_tiny

    folder = make_tiny("llama", tmp_path_factory.mktemp("agent"))
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    with AgentCache(folder, dtype="float32", kv_bytes=128 << 20, max_model_len=8192) as cache:
        yield cache


@pytest.fixture
def savers(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Returns the checkpointer of a policy: the exact one's threads lie in SQLite, the others' in memory."""
    with ExitStack() as stack:

        def make(policy: str) -> Any:
            if policy != "prefix_cache":
                return InMemorySaver()
            return stack.enter_context(SqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")))

        yield make
