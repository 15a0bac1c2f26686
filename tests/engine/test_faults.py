"""Whatever breaks in a store, in the worker half or in a policy: the request is served, exactly or with more recomputed."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from dataclasses import dataclass
from typing import ClassVar

import torch

from agentcache.engine.wire import ResumeParams
from agentcache.recovery import registry
from agentcache.recovery.base import RecoveryPolicy
from tests.engine.harness import NEW, OLD, assert_exact, differs, edit, first_version, lossy, text

pytestmark = pytest.mark.engine


class Broken(Exception):
    """What the tests throw."""


def breaks(monkeypatch, owner, name, times=1, after=0):
    """Makes a method raise on its calls `after` to `after + times`; returns the list of calls."""
    original, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if after < len(calls) <= after + times:
            raise Broken(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def flip(engine, object_id):
    """Corrupts one byte of a stored object."""
    data = engine.worker.store.get(object_id).runs[0].data
    with torch.inference_mode():
        data[len(data) // 2] ^= 0x40


def objects(engine, name="v1"):
    return [extent.object_id for extent in engine.version(name).extents]


# -- stored rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["corrupt", "missing"])
def test_damaged_rows_behind_the_edit_are_recomputed(engine, reference, damage):
    first_version(engine)
    engine.forget_local()
    _, last = objects(engine)
    flip(engine, last) if damage == "corrupt" else engine.worker.store.drop(last)
    child = engine.ask(NEW, lossy("v2"))
    assert child.recovery.lost_tokens == 309 - 266
    assert child.recovery.reused_tokens == 157
    assert child.recovery.restored_tokens == 100 + 157 - 43
    assert "lost or corrupt" in child.recovery.reason
    assert last not in engine.half.index._objects, "nobody is promised these rows again"
    again = engine.ask(NEW, lossy("v3"))
    assert again.recovery.lost_tokens == 0
    assert again.recovery.new_tokens == 310 - 266, "the next plan knows"
    assert_exact(reference, engine.ask(NEW))


@pytest.mark.parametrize("policy", ["prefix_cache", "edit_local"])
def test_a_resume_whose_rows_are_all_corrupt_is_computed_exactly(engine, reference, policy):
    first_version(engine)
    engine.forget_local()
    for object_id in objects(engine):
        flip(engine, object_id)
    child = engine.ask(NEW, lossy("v2", policy=policy))
    assert child.recovery.restored_tokens == 0
    assert child.recovery.lost_tokens == (100 if policy == "prefix_cache" else 257)
    assert_exact(reference, child, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3
    for name in ("v1", "v2"):
        version = engine.version(name)
        assert engine.stored_error(version, version.exact_end) < 1e-3


def test_damage_that_several_resumes_of_one_step_meet(engine, reference):
    first_version(engine)
    engine.forget_local()
    flip(engine, objects(engine)[0])
    children = [engine.add(NEW, lossy(f"c{i}", policy=p)) for i, p in enumerate(["edit_local", "direct_reuse"])]
    exact = engine.add(NEW, ResumeParams(version="e", parent="v1"))
    plain = engine.add(NEW)
    engine.run()
    engine.drain()
    assert all(child.recovery.lost_tokens for child in children)
    assert_exact(reference, exact, plain, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3


def test_a_store_without_room_refuses_saves_and_serves_requests(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), extra={"host_bytes": 0})
    first = engine.ask(OLD, ResumeParams(version="v1"))
    assert first.recovery.saved == "refused"
    assert "do not fit into the store" in first.recovery.reason
    child = engine.ask(NEW, lossy("v2"))
    assert "unknown or was evicted" in child.recovery.reason
    assert_exact(reference, first, child)
    engine.check()


# -- the worker half ---------------------------------------------------------------------------------------------------


def test_a_restore_that_raises_becomes_recomputation(engine, reference, monkeypatch):
    first_version(engine)
    engine.forget_local()
    breaks(monkeypatch, engine.runtime, "restore")
    child = engine.add(NEW, lossy("v2"))
    plain = engine.add(NEW)
    engine.run()
    engine.drain()
    assert child.recovery.restored_tokens == 0
    assert child.recovery.recomputed_tokens == 309
    assert "lost or corrupt" in child.recovery.reason
    assert_exact(reference, child, plain)
    assert engine.audit(NEW)[1] < 1e-3
    again = engine.ask(NEW, lossy("v3"))
    assert again.recovery.reason is None


@pytest.mark.parametrize("batched", [1024, 96], ids=["in the step", "in the background"])
@pytest.mark.parametrize("then", ["run", "abort", "preempt"])
def test_a_segment_forward_that_raises_leaves_the_rows_to_vllm(
    start_engine, tiny, reference, monkeypatch, batched, then
):
    engine = start_engine(tiny("llama"), max_num_batched_tokens=batched)
    first_version(engine)
    engine.forget_local()
    edited = edit(OLD, 100, 10, text(120, seed=5)) + text(40, seed=6)
    calls = breaks(monkeypatch, engine.runtime.segments, "run", after=0 if batched == 1024 else 1)
    child = engine.add(edited, lossy("v2"))
    for _ in range(100):
        engine.step()
        if len(calls) > (batched != 1024):
            break
    if then == "abort":
        engine.abort(child)
    elif then == "preempt":
        engine.preempt()
    engine.run()
    engine.drain()
    engine.check()
    assert_exact(reference, engine.ask(edited))
    assert engine.audit(edited)[1] < 1e-3
    if then == "abort":
        assert engine.version("v2") is None
        return
    assert_exact(reference, child)
    assert "failed in the worker" in child.recovery.reason
    assert child.recovery.exact
    version = engine.version("v2")
    assert engine.stored_error(version, version.exact_end) < 1e-3
    again = engine.ask(edited, lossy("v3"))
    assert again.recovery.reason is None
    assert differs(reference, again)


@pytest.mark.parametrize("policy", ["edit_local", "prefix_cache"])
def test_an_abort_while_the_segment_forward_raises(engine, reference, monkeypatch, policy):
    """The blocks are free, and published, when the scheduler half hears of the failure."""
    first_version(engine)
    engine.forget_local()
    engine.worker.store.drop(objects(engine)[0])
    ids = NEW + text(40, seed=9)

    def run(segments):
        engine.abort(child)
        raise Broken("run")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime.segments, "run", run)
        child = engine.add(ids, lossy("v2", policy=policy))
        engine.step()
    engine.drain()
    engine.check()
    assert engine.version("v2") is None
    assert engine.audit(ids)[1] < 1e-3
    assert_exact(reference, engine.ask(ids))


def test_a_failed_exact_resume_and_its_neighbours_are_exact(engine, reference, monkeypatch):
    """Public blocks of the failed load are shared in the same step, by a resume and by a plain request."""
    first_version(engine)
    engine.forget_local()
    engine.worker.store.drop(objects(engine)[0])  # P must be computed, by the segment forward that raises
    breaks(monkeypatch, engine.runtime.segments, "run")
    turn = text(70, seed=7)
    exact = engine.add(NEW[:100] + turn, ResumeParams(version="e", parent="v1"))
    child = engine.add(NEW, lossy("c"))
    plain = engine.add(NEW[:100] + turn + [9, 10])
    engine.run()
    engine.drain()
    assert_exact(reference, exact, plain, engine.ask(NEW))
    for answer in (exact, child, plain):
        assert engine.audit(answer.prompt)[1] < 1e-3
    assert child.recovery.exact
    assert_exact(reference, child)


def test_a_gather_that_raises_means_no_version(engine, reference, monkeypatch):
    breaks(monkeypatch, engine.runtime, "gather_runs", after=2)
    first = engine.ask(OLD, ResumeParams(version="v1"))
    assert engine.version("v1") is None
    engine.ask([5, 6, 7], n=1)
    assert len(engine.worker.store) == 0, "the part that had been stored is dropped with the next step"
    child = engine.ask(NEW, lossy("v2"))
    assert "unknown" in child.recovery.reason
    assert_exact(reference, first, child)
    first_version(engine)


# -- policies ----------------------------------------------------------------------------------------------------------


def _raises():
    raise Broken("select")


def _raises_late():
    yield 120, 140
    raise Broken("select")


SELECTIONS = {
    "raises": _raises,
    "raises late": _raises_late,
    "halves": lambda: [(1.5, 2.5)],
    "no pairs": lambda: [1, 2],
    "nothing": lambda: None,
    "out of range": lambda: [(-50, 10), (90, 10**9), (10**12, 10**13)],
    "backwards": lambda: [(200, 150), (305, 120)],
    "overlapping": lambda: [(150, 200), (120, 180), (160, 161)],
    "everything": lambda: [(0, 10**9)],
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_policy_that_misbehaves_harms_no_answer(engine, reference, monkeypatch, selection):
    @dataclass(frozen=True)
    class Faulty(RecoveryPolicy):
        name: ClassVar[str] = "faulty"
        source: ClassVar[str] = "a test"

        def select(self, context):
            return SELECTIONS[selection]()

    monkeypatch.setitem(registry._POLICIES, "faulty", Faulty)
    first_version(engine)
    child = engine.ask(NEW, lossy("v2", policy="faulty"))
    if selection in ("raises", "raises late", "halves", "no pairs", "nothing"):
        assert "policy 'faulty' failed" in child.recovery.reason
        assert child.recovery.exact
    if child.recovery.exact:
        assert_exact(reference, child)
    assert_exact(reference, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3
    first_version(engine, "v3", text(100, seed=8))


def test_a_policy_whose_required_option_is_missing_harms_no_answer(engine, reference, monkeypatch):
    @dataclass(frozen=True)
    class Needy(RecoveryPolicy):
        name: ClassVar[str] = "needy"
        source: ClassVar[str] = "a test"
        window: int

        def select(self, context):
            return [(run.new_start, run.new_start + self.window) for run in context.diff.suffix]

    monkeypatch.setitem(registry._POLICIES, "needy", Needy)
    first_version(engine)
    without = engine.ask(NEW, lossy("v2", policy="needy"))
    assert "window" in without.recovery.reason
    assert without.recovery.exact
    given = engine.ask(NEW, lossy("v3", policy="needy", options={"window": 11}))
    assert given.recovery.repair_tokens == 11
    assert_exact(reference, without, engine.ask(NEW))


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        ("nope", {}, "unknown policy"),
        ("edit_local", {"k": -1}, "not allowed"),
        ("edit_local", {"k": "many"}, "not allowed"),
        ("edit_local", {"k": 3, "to": "boundary"}, "not both"),
        ("direct_reuse", {"k": 3}, "no option"),
    ],
)
def test_a_policy_that_cannot_be_had_is_named(engine, reference, policy, options, reason):
    first_version(engine)
    child = engine.ask(NEW, lossy("v2", policy=policy, options=options))
    assert reason in child.recovery.reason
    assert child.recovery.exact
    assert engine.version("v2").exact_end == len(child.ids) - 1
    assert_exact(reference, child)
