"""Online policies on the engine: what is measured is what a slow computation gives, and what is chosen is repaired."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from agentcache.engine.hooks import watch
from agentcache.engine.segments import Segment
from agentcache.recovery import OnlinePolicy, PolicyContext, Signal, Signals, register
from agentcache.types import AlignedRun, merge_runs
from tests.engine.harness import NEW, OLD, Engine, assert_exact, first_version, lossy, text

pytestmark = pytest.mark.engine

ALL = [
    ("attended", {"k": 10_000}),
    ("prophetkv", {"share": 1.0}),
    ("cacheblend", {"share": 1.0, "check": 2}),
    ("frontier", {"threshold": 1.0, "most_tokens": 10_000}),
    ("causal_oracle", {"k": 10_000}),
    ("causal_oracle", {"k": 10_000, "operator": "transplant"}),
    ("mean_shift", {"share": 1.0}),
    ("mean_shift", {"selector": "edit_local"}),
]
SEEN: list[tuple[PolicyContext, Signals]] = []


@register
@dataclass(frozen=True)
class Spy(OnlinePolicy):
    """Lossy: takes what it is told to, and keeps what it was shown."""

    name: ClassVar[str] = "test_online_spy"
    source: ClassVar[str] = "a test"

    wants: str = "query"
    start: int = 200
    stop: int = 230
    select_to: int = 0
    fails: bool = False

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset(map(Signal, self.wants.split(",")))

    def most(self, context: PolicyContext) -> int:
        return self.stop - self.start

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        return [(0, self.select_to)]

    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        SEEN.append((context, signals))
        if self.fails:
            raise RuntimeError("no idea")
        return [(self.start, self.stop)]


@pytest.fixture
def engine(start_engine: Any, tiny: Any) -> Engine:
    SEEN.clear()
    return start_engine(tiny("llama"))


def spy(version: str = "v2", **options: Any) -> Any:
    return lossy(version, policy=Spy.name, options=options)


class Pages:
    """The pages of the next load: as restored, and as they are when the load is done."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before = self.after = torch.zeros(0)
        repair = engine.worker._repair

        def wrapped(load: Any) -> None:
            end = len(load.order.token_ids)
            blocks = load.repair.blocks
            self.before = engine.runtime.rows(blocks, 0, end)
            repair(load)
            self.after = engine.runtime.rows(blocks, 0, end)

        monkeypatch.setattr(engine.worker, "_repair", wrapped)


@torch.inference_mode()
def slow_query_attention(engine: Engine, stale: Any, query: list[int], fresh: range) -> np.ndarray:
    """Returns the query's attention on `stale` rows after rows `fresh` of NEW were computed, by whole matrices."""
    runtime, end = engine.runtime, stale.shape[2]
    ids = [*NEW[:end], *query]
    table = engine._scratch(len(ids))
    slots = table[torch.arange(end) // 32] * 32 + torch.arange(end) % 32
    for layer, pages in enumerate(runtime.pages):
        pages.write(slots, stale[layer, 0].contiguous(), stale[layer, 1].contiguous())
    caught: dict[int, Any] = {}
    with watch([pages.layer for pages in runtime.pages], lambda at, seen: caught.__setitem__(at, seen.q.clone())):
        runtime.segments.forward([Segment(ids, table, fresh.start, fresh.stop), Segment(ids, table, end, len(ids))])
    order = len(query) if len(query) >= len(fresh) else 0  # shorter runs come first
    keys = runtime.rows(table, 0, len(ids))[:, 0]
    total = np.zeros(end)
    for layer in runtime.query_layers:
        q = caught[layer]
        asked = q[len(q) - len(query) :] if order else q[: len(query)]
        group = asked.shape[1] // keys.shape[2]
        k = keys[layer].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", asked.double(), k.double()) * runtime.pages[layer].layer.impl.scale
        seen = torch.arange(len(ids))[None] <= torch.arange(end, len(ids))[:, None]
        mass = scores.masked_fill(~seen, float("-inf")).softmax(-1)[:, -8:].mean((0, 1))
        total += mass[:end].numpy()
    return total / len(runtime.query_layers)


def test_the_query_asks_the_stale_rows(engine, monkeypatch):
    first_version(engine)
    pages = Pages(engine, monkeypatch)
    engine.forget_local()
    query = text(9, seed=5)
    answer = engine.ask([*NEW, *query], spy(), n=2)
    ((context, signals),) = SEEN
    assert answer.recovery.reason is None
    assert context.diff.prefix == 100
    want = slow_query_attention(engine, pages.before, query, range(100, 120))
    np.testing.assert_allclose(signals.query[: len(want)], want, rtol=1e-4, atol=1e-7)
    assert not signals.query[len(want) :].any()
    assert signals.key_error is None and signals.agreement is None
    assert engine.runtime.rows(torch.zeros(1, dtype=torch.int64), 0, 32).abs().max() == 0, (
        "the null block is left clean"
    )


def test_a_check_layer_compares_fresh_with_stale_rows(engine, monkeypatch):
    first_version(engine)
    pages = Pages(engine, monkeypatch)
    engine.forget_local()
    engine.ask(NEW, spy(wants="check"), n=2)
    ((_, signals),) = SEEN
    end = pages.before.shape[2]
    fresh = engine.prefill_rows(NEW[:end])[1].double()
    stale = pages.before[1].double()
    error = (fresh - stale).square().sum((2, 3))
    relative = (error / fresh.square().sum((2, 3))).sqrt()
    rows = slice(120, end)
    for got, want in ((signals.key_error, error[0]), (signals.value_error, error[1])):
        np.testing.assert_allclose(got[rows], want[rows], rtol=2e-3, atol=1e-6)
    for got, want in ((signals.key_deviation, relative[0]), (signals.value_deviation, relative[1])):
        np.testing.assert_allclose(got[rows], want[rows], rtol=2e-3, atol=1e-4)
        assert not got[:120].any(), "rows that are computed in any case are no candidates"
    assert signals.value_deviation[120:end].max() > 0.01


def test_agreement_is_the_cosine_of_what_was_recomputed(engine, monkeypatch):
    first_version(engine)
    pages = Pages(engine, monkeypatch)
    engine.forget_local()
    engine.ask(NEW, spy(wants="agreement", select_to=140), n=2)
    ((_, signals),) = SEEN
    fresh = engine.prefill_rows(NEW)[:, 1].double()  # a run behind exact rows is exact
    stale = pages.before[:, 1].double()
    want = torch.nn.functional.cosine_similarity(
        fresh[:, 120:140].flatten(2), stale[:, 120:140].flatten(2), dim=-1
    ).mean(0)
    np.testing.assert_allclose(signals.agreement[120:140], want, rtol=1e-4)
    assert np.isnan(signals.agreement[:120]).all() and np.isnan(signals.agreement[140:]).all()
    assert float(want.min()) < 0.999


def test_what_is_chosen_is_recomputed_saved_and_reported(engine, monkeypatch):
    first_version(engine)
    pages = Pages(engine, monkeypatch)
    engine.forget_local()
    answer = engine.ask(NEW, spy(), n=2)
    report = answer.recovery
    assert (report.suffix_tokens, report.repair_tokens, report.reused_tokens) == (190, 30, 159)
    assert report.recomputed_tokens == 20 + 30
    assert report.planned_ratio == pytest.approx(30 / 190, abs=1e-6), "the spy selects nothing and announces 30"
    assert report.recompute_ratio == pytest.approx(31 / 190, abs=1e-6), "the last token is always computed"
    changed = (pages.before - pages.after).abs().amax((0, 1, 3, 4)) > 0
    assert changed[200:230].all() and not changed[120:200].any() and not changed[230:].any()
    version = engine.version("v2")
    shared = {e.object_id for e in engine.version("v1").extents}
    rows = merge_runs((e.position, e.stop) for e in version.extents if e.object_id in shared)
    assert rows == ((0, 100), (120, 200), (230, 309))
    engine.check()


def test_a_request_that_ends_with_its_load_shares_no_row_that_was_chosen(engine, monkeypatch):
    first_version(engine)
    pages = Pages(engine, monkeypatch)
    engine.forget_local()
    engine.ask(NEW, spy(), n=1)  # the worker tells what it chose when the request has ended
    version = engine.version("v2")
    shared = {e.object_id for e in engine.version("v1").extents}
    assert merge_runs((e.position, e.stop) for e in version.extents if e.object_id in shared) == ((0, 100),)
    table = engine._scratch(len(version.token_ids))
    extents = engine.half.index.load_plan(version, [AlignedRun(0, 0, 309)])
    engine.runtime.restore(engine.worker.store, extents, table)
    assert torch.equal(engine.runtime.rows(table, 0, 309), pages.after)
    engine.check()


@pytest.mark.parametrize(("policy", "options"), ALL[:-1])
@pytest.mark.parametrize("tail", [0, 40])
def test_the_whole_suffix_repaired_is_a_full_prefill(engine, reference, policy, options, tail):
    first_version(engine)
    engine.forget_local()
    ids = [*NEW, *text(tail, seed=9)]
    answer = engine.ask(ids, lossy("v2", policy=policy, options=options))
    report = answer.recovery
    assert report.reason is None and report.policy == policy
    assert report.reused_tokens == 0 and report.recompute_ratio == 1.0
    assert_exact(reference, answer)
    assert engine.stored_error(engine.version("v2"), len(ids)) < 1e-3
    engine.check()


@pytest.mark.parametrize(("policy", "options"), ALL[:-1])
def test_with_several_edits_too_the_whole_suffix_repaired_is_a_full_prefill(engine, reference, policy, options):
    first_version(engine)
    engine.forget_local()
    ids = [*NEW[:160], *text(9, seed=11), *NEW[160:230], *text(5, seed=12), *NEW[240:]]
    options = {name: value for name, value in options.items() if name != "operator"}
    answer = engine.ask(ids, lossy("v2", policy=policy, options=options))
    report = answer.recovery
    assert report.reason is None and report.reused_tokens == 0 and report.recompute_ratio == 1.0
    assert_exact(reference, answer)
    assert engine.stored_error(engine.version("v2"), len(ids)) < 1e-3
    engine.check()


@pytest.mark.parametrize(("policy", "options"), [*ALL[:5], ALL[-1], ("mean_shift", {"share": 0.1})])
def test_nobody_else_sees_approximate_rows(engine, reference, policy, options):
    first_version(engine)
    engine.forget_local()
    options = {name: value for name, value in options.items() if name in ("selector", "check")}
    options |= {"most_tokens": 64} if policy == "frontier" else {}
    reused = engine.ask(NEW, lossy("v2", policy=policy, options=options))
    assert reused.recovery.reason is None and reused.recovery.reused_tokens > 0 and not reused.recovery.exact
    _, error = engine.audit(NEW)
    assert error < 1e-3
    plain = engine.ask(NEW)
    assert_exact(reference, plain)
    engine.check()


def test_a_shift_is_the_mean_of_its_probes_in_every_layer(engine, monkeypatch):
    first_version(engine)
    pages = Pages(engine, monkeypatch)
    engine.forget_local()
    answer = engine.ask(NEW, lossy("v2", policy="mean_shift", options={"share": 0.1}), n=2)
    assert answer.recovery.reason is None
    end = pages.before.shape[2]
    stale, after = pages.before.double(), pages.after.double()
    fresh = engine.prefill_rows(NEW[:end])[1].double()
    deviation = ((fresh - stale[1]).square().sum((2, 3)) / fresh.square().sum((2, 3))).sqrt()[:, 120:]
    probes = [set((deviation[kind].argsort(descending=True)[:19] + 120).tolist()) for kind in (0, 1)]
    chosen = probes[0] | probes[1]
    assert answer.recovery.repair_tokens == len(chosen)
    kept = [row for row in range(120, end) if row not in chosen]
    for kind in (0, 1):
        rows = sorted(probes[kind])
        weight = deviation[kind].clamp(max=1)[[row - 120 for row in kept]][:, None, None]
        for layer in range(1, len(stale)):
            mean = (after[layer, kind, rows] - stale[layer, kind, rows]).mean(0)
            want = stale[layer, kind, kept] + weight * mean
            torch.testing.assert_close(after[layer, kind, kept], want, rtol=1e-3, atol=1e-4)
            assert (want - stale[layer, kind, kept]).abs().max() > 1e-3


@pytest.mark.parametrize("operator", ["recompute", "transplant"])
def test_an_oracle_takes_the_blocks_of_the_largest_effect(engine, monkeypatch, operator):
    first_version(engine)
    pages = Pages(engine, monkeypatch)
    engine.forget_local()
    options = {"k": 24, "operator": operator}
    answer = engine.ask(NEW, lossy("v2", policy="causal_oracle", options=options), n=2)
    assert answer.recovery.reason is None and answer.recovery.reused_tokens == len(NEW) - 32 - 120 - 24
    end = pages.before.shape[2]
    changed = [row for row in range(120, end) if (pages.before[:, :, row] != pages.after[:, :, row]).any()]
    assert len(changed) == 24
    exact = engine.prefill_rows(NEW[:end])

    def distance(rows: Any) -> float:
        table = engine._scratch(len(NEW))
        slots = table[torch.arange(end) // 32] * 32 + torch.arange(end) % 32
        for layer, page in enumerate(engine.runtime.pages):
            page.write(slots, rows[layer, 0].contiguous(), rows[layer, 1].contiguous())
        hidden = engine.runtime.segments.forward([Segment(NEW, table, end, len(NEW))])
        return engine.runtime.segments.model.compute_logits(hidden[-1:])[0].double().log_softmax(-1)

    def kl(rows: Any) -> float:
        got = distance(rows)
        return float((want.exp() * (want - got)).sum())

    with torch.inference_mode():
        want = distance(exact)
        stale = torch.cat([exact[:, :, :120], pages.before[:, :, 120:]], 2)
        effects = {}
        for start in range(120, end, 8):
            rows = stale.clone()
            rows[:, :, start : start + 8] = exact[:, :, start : start + 8]
            effects[start] = kl(stale) - kl(rows)
    best = sorted(effects, key=effects.__getitem__, reverse=True)[:3]
    assert {row - row % 8 for row in changed} == set(best)
    if operator == "transplant":
        torch.testing.assert_close(pages.after[:, :, changed], exact[:, :, changed], rtol=1e-3, atol=1e-4)


def test_a_window_grows_until_it_agrees(engine):
    first_version(engine)
    sizes = []
    for number, threshold in enumerate((-1.0, 1.0)):
        engine.forget_local()
        options = {"first": 16, "threshold": threshold, "most_tokens": 100}
        answer = engine.ask(NEW, lossy(f"v{number + 2}", policy="frontier", options=options), n=2)
        sizes.append(answer.recovery.repair_tokens)
    assert sizes == [16, 100]


@pytest.mark.parametrize(("policy", "options"), ALL)
def test_a_repair_that_exceeds_the_step_runs_in_the_background(start_engine, tiny, reference, policy, options):
    engine = start_engine(tiny("llama"), extra={"recompute_tokens_per_step": 48})
    first_version(engine)
    engine.forget_local()
    decoding = engine.add(text(40, seed=8), n=12)
    answer = engine.add(NEW, lossy("v2", policy=policy, options=options))
    engine.run()
    engine.drain()
    report = answer.recovery
    assert report.reason is None and report.asynchronous
    if options.get("selector") is None:
        assert report.reused_tokens == 0
        assert_exact(reference, answer)
    assert_exact(reference, decoding)
    engine.check()


def test_a_choice_that_fails_recomputes_everything_and_says_so(engine, reference):
    first_version(engine)
    engine.forget_local()
    answer = engine.ask(NEW, spy(fails=True))
    assert "RuntimeError: no idea" in answer.recovery.reason and "S was recomputed" in answer.recovery.reason
    assert answer.recovery.reused_tokens == 0
    assert_exact(reference, answer)
    engine.check()


def test_rows_that_are_lost_are_no_candidates(engine, reference):
    first_version(engine)
    engine.forget_local()
    version = engine.version("v1")
    engine.worker.store.drop(version.extents[-1].object_id)
    answer = engine.ask(NEW, lossy("v2", policy="attended", options={"k": 10_000}))
    assert answer.recovery.lost_tokens > 0
    assert_exact(reference, answer)


def test_a_preempted_resume_is_repaired_again(engine):
    first_version(engine)
    engine.forget_local()
    answer = engine.add(NEW, spy(), n=6)
    while len(answer.tokens) < 2:
        engine.step()
    engine.preempt()
    engine.forget_local()
    engine.run()
    engine.drain()
    assert answer.recovery.reused_tokens == 159 and answer.recovery.repair_tokens == 30
    engine.check()


def test_versions_are_what_they_were(engine):
    assert OLD[:100] == NEW[:100] and OLD[110:] == NEW[120:]
