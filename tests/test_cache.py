"""The synchronous face on a real engine, and whole scripts that use it: no main guard, Ctrl-C, sudden death."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentcache import (
    AgentCache,
    AgentCacheError,
    EngineDeadError,
    Episode,
    KVPaused,
    PromptRevised,
    RequestError,
    RequestTimeout,
)
from agentcache.engine import embedded
from agentcache.event_log import read_events
from agentcache.events import ReplyEnded

pytestmark = pytest.mark.engine

ENDLESS: dict[str, Any] = {"max_tokens": 1500, "extra": {"ignore_eos": True}}
PROMPT = list(range(100, 400))
EDITED = [*PROMPT[:60], *range(5000, 5040), *PROMPT[90:]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import make_tiny

    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cache(model: Path) -> Iterator[AgentCache]:
    with AgentCache(model, policy="edit_local", dtype="float32", kv_bytes=64 << 20, max_model_len=2048) as cache:
        yield cache


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {limit_s} s"
        time.sleep(0.05)


def test_an_episode_resumes_after_an_edit(cache: AgentCache) -> None:
    episode = cache.episode("thread-1")
    first = episode.generate(PROMPT, max_tokens=4)
    second = episode.generate(EDITED, max_tokens=4)
    assert second.recovery is not None and second.recovery.reused_tokens == 300 - 90 - 32 - 1
    # The last token is vLLM's to compute: its logits are needed.
    assert str(second.recovery).startswith("edit_local: P 60 | X 40 | R 32 | F 177 (57 % reused) | N 1 · ")
    assert [r.version for r in episode.history()] == [first.version, second.version]
    assert episode.head == second.version and episode.id == "thread-1"
    fork = episode.fork(first.version)
    assert isinstance(fork, Episode) and fork.generate(EDITED, max_tokens=1).parent == first.version


def test_a_chunk_serves_any_later_prompt(cache: AgentCache) -> None:
    memory = list(range(7000, 7100))
    chunk = cache.encode_chunk(memory)
    assert cache.encode_chunk(memory) == chunk
    reply = cache.episode("memories").generate([*PROMPT[:50], *memory, *PROMPT[50:60]], max_tokens=2, sources=[chunk])
    assert reply.recovery is not None and reply.recovery.source_tokens == 100 - 32
    assert cache.stats()["chunks"] == {chunk: {"tokens": 100, "context_tokens": 0}}
    cache.drop_chunk(chunk)
    assert cache.stats()["chunks"] == {}


def test_a_stream_is_an_iterator_and_closing_it_aborts(cache: AgentCache) -> None:
    whole = cache.generate(PROMPT, max_tokens=6, extra={"ignore_eos": True})
    chunks = list(cache.stream(PROMPT, max_tokens=6, extra={"ignore_eos": True}))
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    endless = cache.episode("endless").stream(PROMPT, **ENDLESS)
    assert len(list(itertools.islice(endless, 3))) == 3
    endless.close()
    wait_for(cache.reset_prefix_cache, "an engine without requests")


def test_an_error_in_a_stream_reaches_its_reader(cache: AgentCache) -> None:
    with pytest.raises(RequestTimeout):
        list(cache.stream(PROMPT, timeout=0.2, **ENDLESS))


def test_calls_from_many_threads(cache: AgentCache) -> None:
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda i: cache.episode(f"thread {i}").generate(PROMPT[i:], max_tokens=4), range(8)))
    assert [r.token_ids for r in replies] == [cache.generate(PROMPT[i:], max_tokens=4).token_ids for i in range(8)]


def test_an_interrupt_aborts_the_request_and_the_cache_goes_on(cache: AgentCache) -> None:
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        cache.generate(PROMPT, **ENDLESS)
    wait_for(cache.reset_prefix_cache, "an engine without requests", 20)
    assert len(cache.generate(PROMPT, max_tokens=2).token_ids) == 2


def test_a_pair_is_measured_for_a_profile_and_leaves_nothing_behind(cache: AgentCache) -> None:
    before = cache.generate(PROMPT, max_tokens=4).token_ids
    found = cache.profile_pair(PROMPT, EDITED, arms=[("direct_reuse", {})], reply_tokens=2)
    assert found["lengths"] == {"prefix": 60, "old": len(PROMPT), "new": len(EDITED), "suffix": 210}
    assert found["arms"][0]["kl"] > 0
    assert cache.generate(PROMPT, max_tokens=4).token_ids == before
    with pytest.raises(RequestError, match="nothing of the old prompt is aligned behind the edit"):
        cache.profile_pair(PROMPT, PROMPT[:200])


def test_a_busy_engine_measures_nothing(cache: AgentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_IDLE_S", 0.3)
    endless = cache.episode("busy").stream(PROMPT, **ENDLESS)
    next(endless)
    with pytest.raises(AgentCacheError, match="the engine is not idle: requests or saves were open"):
        cache.profile_pair(PROMPT, EDITED)
    endless.close()


def test_a_subscriber_gets_the_kinds_it_asked_for(cache: AgentCache) -> None:
    heard: list[Any] = []
    unsubscribe = cache.subscribe(heard.append, kinds=["prompt_revised"])
    cache.episode("heard").generate(PROMPT, max_tokens=1)
    unsubscribe()
    cache.episode("heard").generate(PROMPT, max_tokens=1)
    assert [e.new_len for e in heard] == [len(PROMPT)]


def test_two_caches_live_side_by_side_and_closing_one_ends_its_open_calls(
    cache: AgentCache, model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "events.jsonl"
    other = AgentCache(model, dtype="float32", kv_bytes=64 << 20, max_model_len=2048, events=log)
    pids = other.pids
    assert set(pids).isdisjoint(cache.pids)
    reply = other.episode("logged").generate(PROMPT, max_tokens=4)
    assert reply.token_ids == cache.generate(PROMPT, max_tokens=4).token_ids
    with ThreadPoolExecutor(1) as threads:
        open_call = threads.submit(other.generate, PROMPT, **ENDLESS)
        time.sleep(0.5)
        other.close()
        with pytest.raises(EngineDeadError, match="was stopped"):
            open_call.result(timeout=60)
    other.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [type(e) for e in read_events(log)] == [PromptRevised, ReplyEnded, KVPaused]
    with pytest.raises(AgentCacheError, match="closed"):
        other.generate(PROMPT)
    with pytest.raises(AgentCacheError, match="closed"):
        next(other.stream(PROMPT))
    assert len(cache.generate(PROMPT, max_tokens=2).token_ids) == 2


SCRIPT = """
import sys
from agentcache import AgentCache

print("main", flush=True)
cache = AgentCache(sys.argv[1], dtype="float32", kv_bytes=64 << 20, max_model_len=2048)
print("pids", *cache.pids, flush=True)
try:
    print("generating", flush=True)
    cache.generate(list(range(100, 400)), max_tokens=1500, extra={"ignore_eos": True})
    print("not interrupted", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("tokens", len(cache.generate(list(range(100, 400)), max_tokens=3).token_ids), flush=True)
"""
"""A script without `if __name__ == "__main__":` that never closes its cache."""


@pytest.fixture
def start_script(model: Path, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        # A process group of its own, as a shell gives to what it runs on a terminal.
        command = [sys.executable, "-P", str(path), str(model)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
        )
        started.append(process)
        return process

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_bare_script_runs_survives_ctrl_c_and_leaves_nothing_behind(
    start_script: Callable[[], subprocess.Popen[str]],
) -> None:
    process = start_script()
    lines = iter(process.stdout or ())
    # Once: the engine's processes did not run the script again.
    assert next(lines) == "main\n"
    said = next(lines)
    assert said.startswith("pids "), said
    pids = [int(pid) for pid in said.split()[1:]]
    assert next(lines) == "generating\n"
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: every process of the group gets it
    assert list(lines) == ["interrupted\n", "tokens 3\n"]
    assert process.wait(timeout=60) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_script_that_is_killed_while_its_engine_starts_leaves_nothing_behind(
    start_script: Callable[[], subprocess.Popen[str]],
) -> None:
    process = start_script()
    parent = psutil.Process(process.pid)

    def engine() -> list[psutil.Process]:
        found = []
        for child in parent.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # vLLM inspects models in short-lived processes
                found += [child] if "spawn_main" in " ".join(child.cmdline()) else []
        return found

    wait_for(lambda: bool(engine()), "an engine process", 120)
    children = engine()
    time.sleep(1.0)  # it reaches its own code
    process.kill()
    wait_for(lambda: not any(c.is_running() and c.status() != "zombie" for c in children), "their end", 30)
