"""Saves with mixed precision on the real engine: what is measured, how blocks are stored, and what that costs a step."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from agentcache.engine import precision
from agentcache.engine.attention_probe import QUERY_TOKENS, query_runs, sampled_layers
from agentcache.engine.orders import SaveOrder, StepReport
from agentcache.engine.precision import block_tags, normalised_attention
from agentcache.engine.wire import ResumeParams
from agentcache.kernels import BLOCK, reference
from agentcache.store.extents import LoadExtent, NewObject
from agentcache.store.scores import decode_scores
from agentcache.types import Run
from tests.engine.harness import NEW, OLD, first_version, lossy, text
from tests.engine.saver_kit import MIXED, payloads, row_tags, spied

pytestmark = pytest.mark.engine

STEP = 1.05  # of the scale of codes


@pytest.fixture
def engine(start_engine, tiny):
    engine = start_engine(tiny("llama"), extra=MIXED)
    yield engine
    engine.drain()
    engine.check()


@pytest.fixture
def three_tags(engine, monkeypatch):
    """Thresholds by which a short prompt of a random model has blocks of every precision."""
    thresholds = precision.Thresholds(tau_low=0.045, tau_high=0.05)
    monkeypatch.setattr(engine.worker.saver, "thresholds", thresholds)
    return thresholds


def attention_by_transformers(folder, ids, prompt_tokens):
    """Returns the normalised attention on each row, from the attention matrices of another implementation of the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        layers = model(torch.tensor([ids]), output_attentions=True).attentions
    asked = [row for run in query_runs(prompt_tokens, len(ids)) for row in range(*run)]
    sampled = [layers[i][0] for i in sampled_layers(len(layers))]
    return normalised_attention(torch.stack([layer[:, asked].mean((0, 1)) for layer in sampled]).mean(0).numpy())


# -- what is measured ----------------------------------------------------------------------------------------------------


def assert_attention_is_measured(engine, folder, reply):
    answer = engine.ask(OLD, ResumeParams(version="v1"), n=reply)
    version = engine.version("v1")
    ids = answer.ids[:-1]
    assert version.token_ids.tolist() == ids
    want = attention_by_transformers(folder, ids, len(OLD))
    got = decode_scores(version.attention)
    large = want > 1e-4
    assert got[large] == pytest.approx(want[large], rel=STEP - 1)
    assert got[~large] == pytest.approx(want[~large], abs=2e-5)
    assert large.mean() > 0.5


@pytest.mark.parametrize("reply", [1, 9, 60])
def test_attention_is_that_of_the_whole_matrices(engine, tiny, reply):
    assert_attention_is_measured(engine, tiny("llama"), reply)


@pytest.mark.parametrize(
    "kind", ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("glm4", "llama3_rope", "qwen2"))]
)
def test_attention_of_other_model_forms(start_engine, tiny, kind):
    assert_attention_is_measured(start_engine(tiny(kind), extra=MIXED), tiny(kind), 9)


def test_rows_of_the_reply_are_asked_about_too():
    assert query_runs(300, 300) == (Run(268, 300),)
    assert query_runs(300, 308) == (Run(268, 308),)
    assert query_runs(300, 400) == (Run(268, 300), Run(368, 400))
    assert query_runs(5, 7) == (Run(0, 7),)
    assert query_runs(9, 4) == (Run(0, 4),)
    assert QUERY_TOKENS == 32


@pytest.mark.parametrize(("layers", "want"), [(30, [3, 11, 18, 26]), (4, [0, 1, 2, 3]), (2, [0, 1]), (1, [0])])
def test_sampled_layers_are_spread_over_the_depth(layers, want):
    assert sampled_layers(layers) == want


def test_a_probe_changes_no_page(engine):
    ids = text(500, seed=4)
    engine.prefill_rows(ids)
    table = engine._scratch(len(ids))
    before = [cache.clone() for cache in engine.runtime.caches]
    queries = engine.runtime.queries(ids, table, 400)
    assert queries.positions.tolist() == [*range(368, 400), *range(468, 500)]
    assert all(layer.shape == (64, 4, 32) for layer in queries.layers)
    for old, new in zip(before, engine.runtime.caches, strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_queries_are_caught_in_batches_of_what_the_engine_takes(engine, monkeypatch):
    ids = text(200, seed=5)
    engine.prefill_rows(ids)
    table = engine._scratch(len(ids))
    whole = engine.runtime.queries(ids, table, 100)
    monkeypatch.setattr(engine.runtime.segments, "max_tokens", 20)
    parts = engine.runtime.queries(ids, table, 100)
    assert sorted(parts.positions.tolist()) == sorted(whole.positions.tolist())
    for a, b in zip(whole.layers, parts.layers, strict=True):
        torch.testing.assert_close(a[whole.positions.argsort()], b[parts.positions.argsort()], atol=1e-4, rtol=1e-4)


def test_residuals_are_those_of_the_values(engine):
    first_version(engine)
    rows = engine.prefill_rows(OLD)
    want = reference.value_residual(rows[:, 1].transpose(1, 2))
    codes = np.concatenate([payload.residual for _, payload in payloads(engine)])[: len(OLD)]
    assert decode_scores(codes) == pytest.approx(want.numpy(), rel=STEP - 1)


# -- how blocks are stored -----------------------------------------------------------------------------------------------


def test_tags_follow_the_risk(engine, three_tags):
    first_version(engine)
    version = engine.version("v1")
    attention = decode_scores(version.attention)
    for extent, payload in payloads(engine):
        tags = [str(run.tag) for run in payload.runs for _ in range(-(-run.tokens // BLOCK))]
        part, residual = attention[extent.position : extent.stop], decode_scores(payload.residual)
        # The codes are within 2.4 % of what was measured, each.
        allowed = zip(*(block_tags(part * factor, residual, three_tags) for factor in (0.95, 1.0, 1.05)), strict=True)
        assert all(tag in block for tag, block in zip(tags, allowed, strict=True))
    assert {*row_tags(engine)} == {"exact", "k8v8", "k8v4"}


@torch.inference_mode()
def test_exact_blocks_are_bit_identical_and_the_others_close(engine, three_tags):
    engine.prefill_rows(OLD)
    table = engine._scratch(len(OLD))
    want = engine.runtime.rows(table, 0, len(OLD))
    ranges = [(at, min(at + 256, len(OLD))) for at in range(0, len(OLD), 256)]
    objects = [NewObject((1 << 40) + i, *rows) for i, rows in enumerate(ranges)]
    saver, store = engine.worker.saver, engine.worker.store
    saver.add([SaveOrder("by hand", table.tolist(), objects, "mixed", OLD, len(OLD))])
    saver.advance(engine.runtime, 0, StepReport())
    assert saver.take_finished() == {"by hand"}
    tags = np.array([str(run.tag) for o in objects for run in store.get(o.object_id).runs for _ in range(run.tokens)])
    for cache in engine.runtime.caches:
        cache[table] = 0
    engine.runtime.restore(store, [LoadExtent(o.object_id, 0, o.stop - o.start, o.start, 0) for o in objects], table)
    got = engine.runtime.rows(table, 0, len(OLD))
    for new in objects:
        store.drop(new.object_id)
    exact = torch.from_numpy(tags == "exact")
    assert torch.equal(got[:, :, exact].view(torch.int32), want[:, :, exact].view(torch.int32))
    error = (got - want).pow(2).sum((0, 3, 4)).sqrt() / want.pow(2).sum((0, 3, 4)).sqrt()  # [K or V, T]
    assert 0 < error[:, tags == "k8v8"].max() < 0.02
    assert error[0, tags == "k8v4"].max() < 0.02
    assert 0.02 < error[1, tags == "k8v4"].max() < precision.LOW_BIT_RESIDUAL


def test_a_resume_from_a_mixed_checkpoint_is_approximate_and_stays_private(engine, three_tags):
    first_version(engine)
    engine.forget_local()
    child = engine.ask(NEW, lossy("v2", policy="direct_reuse"))
    assert child.recovery.restored_tokens > 200
    assert not child.recovery.exact
    assert engine.ask(NEW).cached == 0
    assert engine.audit(NEW)[1] < 1e-3


def test_a_resumed_version_stores_what_is_new_and_is_measured_as_a_whole(engine, tiny):
    first_version(engine)
    known = {extent.object_id for extent in engine.version("v1").extents}
    with spied(engine, "value_residual", "gather_runs") as calls:
        child = engine.ask(OLD + text(50, seed=6), lossy("v2", policy="direct_reuse"))
    version = engine.version("v2")
    new = sum(e.length for e in version.extents if e.object_id not in known)
    assert {e.object_id for e in version.extents} >= known
    assert sum(rows for _, name, rows in calls if name == "gather_runs") == new < 100
    assert sum(rows for _, name, rows in calls if name == "value_residual") == new
    assert len(version.attention) == len(child.ids) - 1
    assert np.count_nonzero(version.attention[: len(OLD)]) > len(OLD) // 2


def test_an_object_never_takes_more_than_was_reserved(engine):
    for length in (1, 2, 5, 33, 65, 130):
        engine.ask(text(length, seed=length), ResumeParams(version=f"n{length}"), n=1)
        for extent, payload in payloads(engine, f"n{length}"):
            assert payload.size_bytes <= extent.length * (engine.runtime.row_bytes + 2)


def test_one_request_may_choose_its_precision(start_engine, tiny):
    engine = start_engine(tiny("llama"))
    engine.ask(OLD, ResumeParams(version="v1", precision="mixed"))
    engine.ask(NEW, ResumeParams(version="v2"))
    assert engine.version("v1").attention is not None
    assert {*row_tags(engine)} != {"exact"}
    assert engine.version("v2").attention is None
    assert {*row_tags(engine, "v2")} == {"exact"}
    assert all(payload.residual is None for _, payload in payloads(engine, "v2"))
    engine.check()


# -- what it costs a step --------------------------------------------------------------------------------------------------


WORK = ("queries", "attention_mass", "value_residual", "gather_runs")


def test_a_save_beside_other_requests_is_spread_over_steps(start_engine, tiny):
    engine = start_engine(tiny("llama"), extra=MIXED | {"save_tokens_per_step": 64}, max_num_batched_tokens=1024)
    other = engine.add(text(40, seed=8), n=60)
    with spied(engine, *WORK) as calls:
        engine.run(engine.add(text(600, seed=9), ResumeParams(version="v1"), n=2))
        while engine.version("v1").state == "saving":
            engine.step()
    assert not other.done
    order = [name for _, name, _ in calls]
    assert order == ["queries", *["attention_mass"] * 4, *["value_residual", "gather_runs"] * 5]
    steps = [step for step, *_ in calls]
    assert len({*steps[:5]}) == 5  # the forward and each layer in a step of its own
    assert steps[5] > steps[4] and len({*steps[5:]}) == 5  # 128 rows a step, and every other step none
    assert steps[-1] - steps[5] == 2 * 4
    engine.run()
    engine.check()


def test_an_idle_engine_saves_in_one_step(engine):
    with spied(engine, *WORK) as calls:
        engine.ask(text(600, seed=9), ResumeParams(version="v1"), n=2)
    assert len({step for step, *_ in calls}) == 1
    assert len(calls) == 1 + 4 + 2 * 5


def test_other_precisions_measure_nothing(start_engine, tiny):
    engine = start_engine(tiny("llama"))
    with spied(engine, *WORK) as calls:
        first_version(engine)
    assert {name for _, name, _ in calls} == {"gather_runs"}


def test_a_checkpoint_that_is_reset_during_its_save_leaves_nothing(start_engine, tiny):
    engine = start_engine(tiny("llama"), extra=MIXED | {"save_tokens_per_step": 32})
    for steps in range(1, 9):
        other = engine.add(text(40, seed=8), n=60)
        parent = engine.add(OLD, ResumeParams(version="v1"), n=2)
        engine.run(parent)
        for _ in range(steps):
            engine.step()
        engine.llm.reset_prefix_cache(reset_connector=True)
        engine.step()
        assert not engine.worker.saver.pending
        assert len(engine.worker.store) == 0
        assert engine.version("v1") is None
        engine.abort(other)
        engine.drain()
        engine.check()


def test_a_request_that_is_aborted_in_its_reply_is_measured_and_saved(engine):
    answer = engine.add(OLD, ResumeParams(version="v1"), n=40)
    for _ in range(4):
        engine.step()
    engine.abort(answer)
    engine.drain()
    version = engine.version("v1")
    assert version is None or len(version.attention) == len(version.token_ids)
