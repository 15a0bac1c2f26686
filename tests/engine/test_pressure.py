"""Many requests at once, aborts, preemptions and evictions."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from tests.engine.harness import NEW, OLD, assert_exact, differs, edit, first_version, lossy, text

pytestmark = pytest.mark.engine

SMALL_STORE = {"host_bytes": 2 << 20}  # a row takes 2 KiB: about a thousand rows


def test_several_resumes_in_one_step_are_merged_and_harm_nobody(engine, reference, monkeypatch):
    texts = [text(200 + 17 * i, seed=10 + i) for i in range(4)]
    edited = [edit(ids, 60 + 9 * i, 7, text(5 + 4 * i, seed=20 + i)) for i, ids in enumerate(texts)]
    alone = []
    for i, ids in enumerate(texts):
        first_version(engine, f"p{i}", ids)
    for i, ids in enumerate(edited):
        engine.forget_local()
        alone.append(engine.ask(ids, lossy(f"alone{i}", f"p{i}", options={"k": 8 * i}, save=False)))
    engine.forget_local()
    batches: list[int] = []
    segments = engine.worker.runtime.segments
    forward = segments.forward
    monkeypatch.setattr(segments, "forward", lambda batch: (batches.append(len(batch)), forward(batch))[1])
    plain = [engine.add(text(90, seed=30)), engine.add(edited[1])]
    together = [engine.add(ids, lossy(f"c{i}", f"p{i}", options={"k": 8 * i})) for i, ids in enumerate(edited)]
    plain += [engine.add(edited[0]), engine.add(text(33, seed=31))]
    engine.run()
    engine.drain()
    assert len(batches) == 1, "one segment forward serves all resumes of a step"
    assert batches[0] >= 4
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert sum(differs(reference, a) for a in together) >= 3
    assert_exact(reference, *plain)


def test_a_repair_beyond_the_step_budget_runs_in_slices_while_others_decode(start_engine, tiny, reference):
    ids = text(500, seed=40)
    edited = edit(ids, 50, 5, text(300, seed=41))
    expected = None
    for batched in (1024, 96):
        engine = start_engine(tiny("llama"), max_num_batched_tokens=batched)
        first_version(engine, ids=ids)
        engine.forget_local()
        others = [engine.add(text(20, seed=42 + i), n=40) for i in range(3)]
        while not all(other.tokens for other in others):
            engine.step()
        child = engine.add(edited, lossy("v2", options={"k": 60}))
        states, progress = [], []
        while not child.done:
            before = sum(len(other.tokens) for other in others)
            engine.step()
            states.append(engine.status(child))
            progress.append(sum(len(other.tokens) for other in others) - before)
        engine.run()
        engine.drain()
        assert child.recovery.recomputed_tokens == 360
        assert_exact(reference, *others, engine.ask(edited))
        expected = expected or child.tokens
        assert child.tokens == expected, "slices change nothing"
        waiting = states.count("WAITING_FOR_REMOTE_KVS")
        assert child.recovery.asynchronous == (batched == 96)
        assert waiting >= 3 if batched == 96 else waiting == 0
        assert all(made == 3 for made in progress[:waiting]), "every other request decodes in every step"
        engine.check()


def test_resumes_that_exceed_the_step_budget_together_share_it(start_engine, tiny, reference, monkeypatch):
    engine = start_engine(tiny("llama"), max_num_batched_tokens=128)
    edited = [edit(text(250, seed=45 + i), 60, 7, text(40, seed=47 + i)) for i in range(3)]
    for i in range(3):
        first_version(engine, f"p{i}", text(250, seed=45 + i))
    engine.forget_local()
    computed: list[int] = []
    segments = engine.runtime.segments
    forward = segments.forward
    monkeypatch.setattr(segments, "forward", lambda batch: (computed.append(sum(map(len, batch))), forward(batch))[1])
    children = [engine.add(ids, lossy(f"c{i}", f"p{i}")) for i, ids in enumerate(edited)]
    while not all(child.done for child in children):
        computed.clear()
        engine.step()
        assert sum(computed) <= 128
    engine.drain()
    assert [child.recovery.asynchronous for child in children] == [False, True, True]
    assert [child.recovery.recomputed_tokens for child in children] == [72] * 3
    assert_exact(reference, *[engine.ask(ids) for ids in edited])
    engine.check()


# -- aborts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_during_a_background_load_frees_everything(start_engine, tiny, reference, steps):
    engine = start_engine(tiny("llama"), max_num_batched_tokens=96)
    first_version(engine)
    engine.forget_local()
    edited = edit(OLD, 50, 5, text(200, seed=50))
    child = engine.add(edited, lossy("v2"))
    other = engine.add(text(30, seed=51), n=10)
    for _ in range(steps):
        engine.step()
    if 0 < steps < 3:
        assert engine.status(child) == "WAITING_FOR_REMOTE_KVS"
    engine.abort(child)
    engine.run()
    engine.drain()
    engine.check()
    assert engine.version("v2") is None
    plain = engine.ask(edited)
    again = engine.ask(edited, lossy("v2"))
    assert again.recovery.reason is None
    assert_exact(reference, other, plain)


def test_an_abort_in_the_middle_of_generation_keeps_what_was_computed(engine, reference):
    first_version(engine)
    child = engine.add(NEW, lossy("v2"), n=50)
    for _ in range(6):
        engine.step()
    engine.abort(child)
    engine.drain()
    engine.check()
    version = engine.version("v2")
    assert version.state == "committed"
    assert len(version.token_ids) >= len(NEW)
    grandchild = engine.ask([*version.token_ids.tolist(), *text(5, seed=60)], lossy("v3", "v2"))
    assert grandchild.recovery.reason is None
    assert_exact(reference, engine.ask(NEW))


def test_an_abort_while_the_parent_is_saved_lets_go_of_the_parent(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), extra={"save_tokens_per_step": 32})
    other = engine.add(text(40, seed=61), n=40)
    parent = engine.add(OLD, ResumeParams(version="v1"), n=4)
    engine.run(parent)
    child = engine.add(NEW, lossy("v2"))
    assert engine.version("v1").state == "saving"
    engine.abort(child)
    engine.run()
    engine.drain()
    engine.check()
    assert engine.version("v1").state == "committed"
    assert_exact(reference, other, parent)


# -- preemptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_blocks", [True, False])
def test_a_preempted_resume_is_recovered_again(engine, reference, keep_blocks):
    first_version(engine)
    undisturbed = engine.ask(NEW, lossy("a"), n=20)
    engine.forget_local()
    child = engine.add(NEW, lossy("b"), n=20)
    plain = engine.add(NEW, n=20)
    for _ in range(7):
        engine.step()
    assert not child.done
    engine.preempt()
    if not keep_blocks:
        engine.forget_local()
    engine.run()
    engine.drain()
    assert engine.preemptions == 2
    assert child.tokens == undisturbed.tokens
    if keep_blocks:
        assert child.recovery.local_tokens == 288
    else:
        assert child.recovery.restored_tokens == 100 + 157, "P and F once more"
    assert_exact(reference, plain)
    assert engine.audit(NEW)[1] < 1e-3
    version = engine.version("b")
    assert engine.stored_error(version, version.exact_end) < 1e-3


def test_a_resume_that_is_preempted_in_its_new_turn_is_recovered_again(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), max_num_batched_tokens=96)
    first_version(engine)
    ids = NEW + text(250, seed=62)
    undisturbed = engine.ask(ids, lossy("a"))
    engine.forget_local()
    child = engine.add(ids, lossy("b"))
    engine.step()
    engine.step()
    assert engine.status(child) == "RUNNING"
    assert not child.tokens, "the new turn is still being prefilled"
    engine.preempt()
    engine.forget_local()
    engine.run()
    engine.drain()
    assert child.tokens == undisturbed.tokens
    assert engine.preemptions == 1
    assert_exact(reference, engine.ask(ids))
    engine.check()


def test_memory_pressure_preempts_resumes_without_harm(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), blocks=34, max_model_len=512)
    first_version(engine)
    undisturbed = engine.ask(NEW, lossy("x"), n=60)
    engine.forget_local()
    children = [engine.add(NEW, lossy(f"c{i}"), n=60) for i in range(3)]
    plain = [engine.add(NEW, n=60), engine.add(text(200, seed=70), n=60)]
    engine.run()
    engine.drain()
    assert engine.preemptions > 0
    assert [child.tokens for child in children] == [undisturbed.tokens] * 3
    assert_exact(reference, *plain, engine.ask(NEW))
    engine.check()


# -- evictions ---------------------------------------------------------------------------------------------------------


def test_a_parent_that_a_waiting_request_needs_is_not_evicted(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), extra=SMALL_STORE, max_num_seqs=1)
    first_version(engine)
    engine.forget_local()
    others = [engine.add(text(280, seed=80 + i), ResumeParams(version=f"o{i}"), n=1) for i in range(4)]
    child = engine.add(NEW, lossy("v2"))  # planned now, loaded after the others have run and were saved
    engine.run(*others)
    assert engine.half.index.stats()["evictions"] > 0
    engine.run()
    engine.drain()
    assert child.recovery.reason is None
    assert child.recovery.reused_tokens == 157
    assert_exact(reference, engine.ask(NEW))
    engine.check()


def test_a_parent_that_was_dropped_after_the_plan_means_a_full_prefill(engine, reference):
    first_version(engine)
    engine.forget_local()
    child = engine.add(NEW, lossy("v2"))
    engine.half.index.drop_version(engine.version("v1"))
    engine.run()
    engine.drain()
    assert "dropped before it could be restored" in child.recovery.reason
    assert child.recovery.exact
    assert_exact(reference, child, engine.ask(NEW))


def test_rows_lost_after_the_plan_join_the_recomputation(engine, reference):
    first_version(engine)
    engine.forget_local()
    child = engine.add(NEW, lossy("v2"))
    engine.half.index.lose_objects([engine.version("v1").extents[-1].object_id])  # old rows 256 and on
    engine.run()
    engine.drain()
    report = child.recovery
    assert report.lost_tokens == 309 - 266
    assert report.restored_tokens == report.prefix_tokens + report.reused_tokens - report.lost_tokens
    assert_exact(reference, engine.ask(NEW))


def test_eviction_drops_the_oldest_episode_and_its_child_is_served_exactly(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), extra=SMALL_STORE)
    first_version(engine, episode="old")
    for i in range(4):
        first_version(engine, f"o{i}", text(280, seed=90 + i), episode=f"e{i}")
    assert engine.version("v1") is None
    child = engine.ask(NEW, lossy("v2"))
    assert "unknown or was evicted" in child.recovery.reason
    assert_exact(reference, child)
    engine.check()


def test_a_reset_with_open_episodes_forgets_checkpoints_and_keeps_answers_exact(engine, reference):
    first_version(engine)
    second = first_version(engine, "w1", text(290, seed=95))
    engine.forget_local()
    running = engine.add(NEW, lossy("v2"), n=20)
    saving = engine.add(text(300, seed=96), ResumeParams(version="s1"), n=2)
    engine.run(saving)
    waiting = engine.add(edit(second.prompt, 90, 4, text(9, seed=97)), lossy("w2", "w1"))
    engine.llm.reset_prefix_cache(reset_connector=True)
    late = engine.add(NEW, lossy("v3"))
    plain = engine.add(NEW)
    engine.run()
    engine.drain()
    assert len(running.tokens) == 20
    assert "dropped" in waiting.recovery.reason
    assert "unknown" in late.recovery.reason
    assert_exact(reference, waiting, late, plain, engine.ask(NEW))
    engine.check()
