"""Chunks that are gone, not saved yet, dropped or lost under a request, or in the store alone: what is there is still used."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from tests.engine.chunk_kit import JOIN, PROMPT, QUESTION, A, B, chunks, drawing, encode, pages, turned
from tests.engine.durable_kit import assert_idle, forget_memory, stores
from tests.engine.harness import OLD, assert_exact, first_version, lossy, row_error, text

pytestmark = pytest.mark.engine


def test_sources_that_are_not_there_are_named_and_the_rest_goes_on(engine, reference):
    encode(engine, "a", A)
    encode(engine, "b", B, namespace="other")
    engine.forget_local()
    running = engine.add(text(60, seed=42), ResumeParams(version="late"), 40)
    engine.step()
    answer = engine.add(PROMPT, drawing("v", sources=["gone", "b", "a", "late"]))
    engine.run()
    engine.drain()
    recovery = answer.recovery
    assert recovery.reason == (
        "each of the sources 'gone', 'b' is unknown or was evicted; source 'late' is still generating"
    )
    assert recovery.lost_sources == ["gone", "b", "late"]
    assert (recovery.sources, recovery.reused_tokens) == (["a"], 100)
    assert_exact(reference, running, engine.ask(PROMPT))


def test_without_its_parent_a_request_still_draws_on_its_sources(engine):
    chunks(engine)
    answer = engine.ask(PROMPT, drawing("v", parent="gone", aligned=[(0, 0, 200)]))
    assert answer.recovery.reason == "parent 'gone' is unknown or was evicted"
    assert (answer.recovery.reused_tokens, answer.recovery.lost_sources) == (219, [])


def test_nothing_in_common_is_said(engine, reference):
    chunks(engine)
    answer = engine.ask(OLD, drawing("v"))
    assert answer.recovery.reason == "nothing of the sources can be reused"
    first_version(engine)
    unrelated = engine.ask(text(99, seed=43), drawing("w", parent="v1"))
    assert unrelated.recovery.reason == "nothing of the parent or the sources can be reused"
    assert_exact(reference, answer, unrelated)


def test_a_request_waits_for_a_source_that_is_being_saved(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), extra={"save_tokens_per_step": 32})
    decoding = engine.add(text(40, seed=8), n=80)
    saving = engine.add(A, ResumeParams(version="a"), 1)
    engine.run(saving)
    assert engine.version("a").state == "saving"
    answer = engine.add(PROMPT, drawing("v", sources=["a"]))
    engine.run()
    engine.drain()
    assert (answer.recovery.reason, answer.recovery.reused_tokens) == (None, 100)
    assert_exact(reference, decoding, engine.ask(PROMPT))
    engine.check()


@pytest.mark.parametrize("gone", ["a", "b", "v1"])
def test_a_part_that_is_dropped_before_its_rows_are_copied_is_computed(engine, gone):
    first_version(engine)
    chunks(engine)
    prompt = [*OLD[:100], *A, *OLD[110:], *JOIN, *B, *QUESTION]
    answer = engine.add(prompt, drawing("v", parent="v1"), 3)
    engine.half.index.drop_version(engine.version(gone))
    got = pages(engine, answer, 419)
    engine.run()
    engine.drain()
    recovery = answer.recovery
    kind = "parent" if gone == "v1" else "source"
    lost = {"a": 100, "b": 120, "v1": 290}[gone]
    assert recovery.reason.startswith(
        f"{kind} {gone!r} was dropped before it could be restored; {lost} stored rows were lost"
    )
    assert recovery.lost_sources == ([] if gone == "v1" else [gone])
    assert recovery.restored_tokens == 100 + 190 + 100 + 120 - lost
    assert engine.half.index.stats()["versions"] == 3
    if gone != "a":
        assert row_error(got[:, :, 100:200], turned(engine, engine.prefill_rows(A), 100)) < 1e-3
    else:
        assert row_error(got[:, :, :200], engine.prefill_rows(prompt[:200])) < 1e-3, "right behind exact rows"
    version = engine.version("v")
    assert version.missing() == ()
    assert engine.audit(prompt)[1] < 1e-3
    engine.check()


def test_when_all_of_it_was_dropped_vllm_computes_the_prompt(engine, reference):
    chunks(engine)
    answer = engine.add(PROMPT, drawing("v"))
    engine.half.index.clear()
    engine.run()
    engine.drain()
    assert "source 'a' was dropped" in answer.recovery.reason
    assert "source 'b' was dropped" in answer.recovery.reason
    assert (answer.recovery.exact, answer.recovery.policy, answer.recovery.sources) == (True, "prefix_cache", [])
    assert_exact(reference, answer, engine.ask(PROMPT))


def test_rows_of_a_chunk_that_are_lost_are_computed(engine, reference):
    chunks(engine)
    (extent,) = engine.version("a").extents
    engine.worker.store.drop(extent.object_id)
    answer = engine.ask(PROMPT, drawing("v"))
    assert answer.recovery.lost_tokens == 100
    assert "lost or corrupt" in answer.recovery.reason
    assert engine.version("v").missing() == ()
    again = engine.ask(PROMPT, drawing("w"))
    assert (again.recovery.reused_tokens, again.recovery.sources) == (119, ["b"])
    assert_exact(reference, engine.ask(PROMPT))


def test_a_preempted_request_draws_on_its_sources_again(engine, reference):
    chunks(engine)
    calm = engine.ask(PROMPT, drawing("v"), 12)
    engine.forget_local()
    answer = engine.add(PROMPT, drawing("w"), 12)
    while len(answer.tokens) < 4:
        engine.step()
    engine.preempt()
    engine.run()
    engine.drain()
    assert engine.preemptions == 1
    assert answer.tokens == calm.tokens
    assert_exact(reference, engine.ask(PROMPT))


def test_a_chunk_that_is_dropped_when_it_was_used_lives_on_in_the_version(engine):
    chunks(engine)
    engine.ask(PROMPT, drawing("v"))
    for name in ("a", "b"):
        engine.half.index.drop_version(engine.version(name))
    engine.forget_local()
    child = engine.ask([*PROMPT, *JOIN], lossy("w", "v", "direct_reuse"))
    assert child.recovery.restored_tokens == len(PROMPT)
    engine.check()


# -- below memory ------------------------------------------------------------------------------------------------------


def test_chunks_come_up_from_the_store_and_their_rows_go_down_with_the_version(start_engine, tiny, reference, tmp_path):
    engine = start_engine(tiny("llama"), extra={"store": f"disk://{tmp_path / 'store'}?fsync=false"})
    chunks(engine)
    calm = engine.ask(PROMPT, drawing("v"))
    engine.half.index.drop_version(engine.version("v"))
    assert stores(engine)[0].delete("default", "v") is True
    forget_memory(engine)
    answer = engine.ask(PROMPT, drawing("v", sources=["a", "gone", "b"]))
    recovery = answer.recovery
    assert (recovery.tier, recovery.reason) == ("store", "source 'gone' is unknown or was evicted")
    assert (recovery.restored_tokens, recovery.lost_sources) == (219, ["gone"])
    assert recovery.fetch_ms > 0
    assert answer.tokens == calm.tokens
    warm = engine.ask(PROMPT, drawing("w", sources=["a", "gone", "gone"]))
    assert (warm.recovery.tier, warm.recovery.lost_sources) == ("memory", ["gone"]), "nothing came from there"
    stored = {name: stores(engine)[0].find("default", name) for name in ("a", "b", "v")}
    keys = {name: {entry.key for entry in manifest.objects} for name, manifest in stored.items()}
    assert keys["v"] & keys["a"]
    assert keys["v"] & keys["b"]
    forget_memory(engine)
    child = engine.ask([*PROMPT, *JOIN], lossy("w", "v", "direct_reuse"))
    assert (child.recovery.tier, child.recovery.reason) == ("store", None)
    assert child.recovery.restored_tokens == len(PROMPT)
    assert_exact(reference, engine.ask(PROMPT))
    assert_idle(engine)
