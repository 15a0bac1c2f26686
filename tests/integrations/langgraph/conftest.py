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
from tests.ending import ends_with

TEMPLATE = Path(__file__).parents[1] / "templates" / "qwen2_5.jinja"
ENGINE = pytest.StashKey[AgentCache]()


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AgentCache:
    """A tiny random model with the chat template of Qwen2.5, which shows tools; one engine for all tests of this folder."""
    stash = request.config.stash
    if ENGINE not in stash:
        from tests.models import make_tiny

        folder = make_tiny("llama", tmp_path_factory.mktemp("agent"))
        shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
        stash[ENGINE] = AgentCache(folder, dtype="float32", kv_bytes=128 << 20, max_model_len=8192)
        ends_with(request, Path(__file__).parent, stash[ENGINE].close)
    return stash[ENGINE]


@pytest.fixture
def savers(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Returns the checkpointer of a policy: the exact one's threads lie in SQLite, the others' in memory."""
    with ExitStack() as stack:

        def make(policy: str) -> Any:
            if policy != "prefix_cache":
                return InMemorySaver()
            return stack.enter_context(SqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")))

        yield make
