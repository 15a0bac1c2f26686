"""A second process on the engine's store folder, which deletes, evicts and clears away under its hands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from agentcache import AgentCache
from agentcache.engine.wire import ResumeParams
from agentcache.store.tiers import Manifest, Refused, open_store
from tests.engine.durable_kit import assert_healthy, assert_idle, clear_store, forget_memory, put_down, stores
from tests.engine.harness import NEW, OLD, Engine, assert_exact, edit, first_version, lossy, text

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
PROGRAM = [sys.executable, str(HERE / "store_process.py")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("two") / "store"


@pytest.fixture
def engine(start_engine, tiny, folder) -> Iterator[Engine]:
    """Returns an engine over an empty folder; one for all tests of this module."""
    engine = start_engine(tiny("llama"), extra={"store": f"disk://{folder}?fsync=false"})
    clear_store(stores(engine)[0])
    yield engine
    assert_idle(engine)


@pytest.fixture
def other(engine, folder) -> Iterator[Callable[..., str]]:
    """Returns what calls a method of the other process's store."""
    with subprocess.Popen(
        [*PROGRAM, str(folder), str(1 << 30)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def call(*message: object) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield call
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


def before(monkeypatch, store, name, action):
    """Does something just before a store's first call of a method."""
    original, left = getattr(store, name), [action]

    def call(*args):
        while left:
            left.pop()()
        return original(*args)

    monkeypatch.setattr(store, name, call)


@pytest.mark.parametrize("policy", ["prefix_cache", "edit_local"])
@pytest.mark.parametrize("name", ["_find", "_fetch"])
def test_a_version_that_another_process_deletes_under_a_resume(engine, reference, monkeypatch, other, name, policy):
    put_down(engine)
    scheduler, worker = stores(engine)

    def delete():
        assert other("delete", "default", "v1") == "True"
        assert "GcReport" in other("gc")

    with monkeypatch.context() as patch:
        before(patch, scheduler if name == "_find" else worker, name, delete)
        child = engine.ask(NEW, lossy("v2", policy=policy))
    if name == "_find":
        assert "unknown or was evicted" in child.recovery.reason
    else:
        assert child.recovery.lost_tokens == (100 if policy == "prefix_cache" else 257)
    if child.recovery.exact:
        assert_exact(reference, child)
    assert_exact(reference, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3
    assert_healthy(engine, reference)


@pytest.mark.parametrize("name", ["holds", "_prepare", "_put", "_complete"])
def test_a_parent_that_another_process_deletes_while_its_child_is_saved(
    engine, reference, monkeypatch, folder, other, name
):
    """From `prepare` on, the child's open save keeps what it shares; before, it stores it once more."""
    first_version(engine)
    scheduler, worker = stores(engine)
    engine.forget_local()

    def delete():
        assert other("delete", "default", "v1") == "True"
        assert "GcReport" in other("gc")

    with monkeypatch.context() as patch:
        before(patch, worker if name == "_put" else scheduler, name, delete)
        child = engine.ask(NEW, lossy("v2"))
    assert child.recovery.reason is None
    first_version(engine, "later", text(60, seed=3))
    assert_idle(engine)
    assert isinstance(scheduler.find("default", "v2"), Manifest)
    forget_memory(engine)
    again = engine.ask(edit(NEW, 20, 3, [77]), lossy("v3", "v2"))
    assert (again.recovery.tier, again.recovery.reason) == ("store", None)
    with open_store(f"disk://{folder}") as store:
        assert store.verify().faults == ()
        store.check_integrity()
    assert_healthy(engine, reference)


def test_another_process_writes_evicts_and_clears_all_the_while(engine, reference, folder, other):
    """Its budget is so small that each of its saves evicts what the engine has stored."""
    command = [*PROGRAM, str(folder), "200000"]
    outcomes = set()
    with subprocess.Popen(command, stdin=subprocess.PIPE) as writer:
        try:
            assert writer.stdin is not None
            writer.stdin.write(b'["storm"]\n')
            writer.stdin.flush()
            for number in range(10):
                first_version(engine, f"p{number}", OLD)
                forget_memory(engine)
                child = engine.ask(NEW, ResumeParams(version=f"c{number}", parent=f"p{number}"))
                outcomes.add(child.recovery.reason is None)
                assert child.recovery.exact
                assert_exact(reference, child)
                assert "GcReport" in other("gc")
                engine.check()
        finally:
            writer.kill()
    assert_idle(engine)
    assert_exact(reference, engine.ask(NEW))
    assert False in outcomes, "nothing was evicted"
    report = stores(engine)[0].verify()
    assert not isinstance(report, Refused)
    assert report.faults == ()
    stores(engine)[0].check_integrity()
    assert_healthy(engine, reference)


@pytest.mark.slow
def test_two_caches_on_one_store_resume_each_others_episodes(tiny, start_engine, tmp_path):
    start_engine.stop()
    url = f"disk://{tmp_path / 'store'}"
    settings = {"dtype": "float32", "kv_bytes": 64 << 20, "max_model_len": 1024, "store": url}
    reply = {"max_tokens": 8, "extra": {"ignore_eos": True}}
    with AgentCache(tiny("llama"), **settings) as one, AgentCache(tiny("llama"), **settings) as two:
        want = one.generate(NEW, **reply)
        first = one.episode("thread").generate(OLD, **reply)
        assert one.flush()
        taken = two.reopen("thread")
        second = taken.generate(NEW, **reply)
        assert second.recovery is not None
        assert (second.recovery.tier, second.recovery.reason, second.recovery.parent) == ("store", None, first.version)
        assert second.token_ids == want.token_ids
        assert two.flush()
        back = one.episode("thread").generate([*NEW, *second.token_ids, 5, 6], parent=second.version, **reply)
        assert back.recovery is not None
        assert (back.recovery.tier, back.recovery.reason) == ("store", None)
        assert back.recovery.prefix_tokens > 300
        assert one.flush()
    with open_store(url) as store:
        assert store.verify().faults == ()
        assert len(store.versions()) == 3
        store.check_integrity()
