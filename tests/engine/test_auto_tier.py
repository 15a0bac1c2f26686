"""Policy `auto` above a tier that may be slow, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from agentcache.engine.costs import Sample, work_of
from agentcache.store.tiers.memory import MemoryStore
from tests.engine.desk import FINGERPRINT, Desk
from tests.engine.harness import NEW, OLD

AUTO = {"version": "v2", "parent": "v1", "policy": "auto", "options": {"margin": 0.0}}


@pytest.fixture
def desk() -> Iterator[Desk]:
    """Returns a desk whose version `v1` is in the store below alone, on a machine that computes a row in a millisecond."""
    desk = Desk(MemoryStore(1 << 30, fingerprint=FINGERPRINT))
    desk.half.costs.fit([Sample("forward", *work_of([(0, n)]), n * 1e-3) for n in (1, 64, 256)])
    desk.serve(OLD, {"version": "v1"})
    desk.drain()
    desk.half.reset()
    desk.step()
    yield desk
    desk.drain()
    desk.check()
    desk.close()


def test_a_fast_tier_is_worth_waiting_for(desk: Desk):
    recovery = desk.serve(NEW, AUTO)
    assert (recovery.tier, recovery.policy, recovery.reason) == ("store", "edit_local", None)
    assert recovery.reused_tokens == 157


def test_a_slow_tier_is_not(desk: Desk):
    for _ in range(9):
        desk.half.costs.observe_fetch(300, 60.0)
    recovery = desk.serve(NEW, AUTO)
    assert (recovery.policy, recovery.exact, recovery.reused_tokens, recovery.prefix_tokens) == (
        "prefix_cache",
        True,
        0,
        0,
    )
    assert recovery.reason is not None
    assert recovery.reason.startswith("prefix caching was chosen: it is estimated to take 310 ms, edit_local")


def test_every_fetch_tells_how_fast_the_tier_is_also_one_that_nobody_waited_for(desk: Desk):
    costs = desk.half.costs
    for _ in range(9):
        costs.observe_fetch(300, 60.0)
    seen, slow = costs.fetches.seen, costs.fetch_s(300)
    desk.serve(NEW, AUTO)
    desk.drain()
    desk.step()
    assert costs.fetches.seen == seen + 1
    assert costs.fetch_s(300) < slow


def test_a_parent_in_memory_is_no_fetch(desk: Desk):
    desk.serve(NEW, {"version": "v2", "parent": "v1", "policy": "edit_local"})
    desk.drain()
    seen = desk.half.costs.fetches.seen
    for _ in range(9):
        desk.half.costs.observe_fetch(300, 60.0)
    assert desk.serve(NEW, {**AUTO, "version": "v3"}).policy == "edit_local"
    assert desk.half.costs.fetches.seen == seen + 9
