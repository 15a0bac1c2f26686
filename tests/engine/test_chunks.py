"""Rows of chunks and other versions in one prompt: right rows, turned by the right angle, seen by nobody who did not ask."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

import torch

from agentcache.engine.wire import ResumeParams
from agentcache.types import AlignedRun
from tests.engine.harness import (
    BLOCK,
    OLD,
    Answer,
    Engine,
    assert_exact,
    differs,
    first_version,
    lossy,
    row_error,
    text,
)

pytestmark = pytest.mark.engine

A, B = text(100, seed=31), text(120, seed=32)
SYSTEM, JOIN, QUESTION = text(40, seed=33), text(9, seed=34), text(15, seed=35)
PROMPT = [*SYSTEM, *B[1:], *JOIN, *A, *QUESTION]
"""B from 40 on, without its first token, A from 168 on, the question from 268 on."""
STOP = 268


def encode(engine: Engine, name: str, ids: list[int], **more: object) -> None:
    """Saves a chunk as `encode_chunk` does."""
    answer = engine.ask(ids, ResumeParams(version=name, **more), n=1)
    assert answer.recovery.saved == "pending"


def chunks(engine: Engine) -> None:
    encode(engine, "a", A)
    encode(engine, "b", B)
    engine.forget_local()


def drawing(version: str, policy: str = "direct_reuse", **more: object) -> ResumeParams:
    """Returns the parameters of a request without parent that names both chunks."""
    return ResumeParams(**{"version": version, "policy": policy, "sources": ["a", "b"]} | more)


@torch.inference_mode()
def pages(engine: Engine, answer: Answer, stop: int) -> torch.Tensor:
    """Returns a running request's rows `[L, 2, T, H, D]` once its first token is there."""
    while not answer.tokens:
        engine.step()
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(answer.request_id)
    return engine.runtime.rows(torch.tensor(blocks), 0, stop).clone()


def turned(engine: Engine, rows: torch.Tensor, shift: int) -> torch.Tensor:
    """Returns rows whose keys stand `shift` positions further on: the rotary embedding by its definition, in float64."""
    config = engine.llm.llm_engine.vllm_config.model_config.hf_config
    theta = config.rope_parameters["rope_theta"]
    half = rows.shape[-1] // 2
    angle = shift * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    plane = torch.complex(rows[:, 0, ..., :half].double(), rows[:, 0, ..., half:].double())
    plane = plane * torch.polar(torch.ones_like(angle), angle)
    out = rows.clone()
    out[:, 0] = torch.cat((plane.real, plane.imag), dim=-1).to(rows.dtype)
    return out


# -- the rows ----------------------------------------------------------------------------------------------------------


def test_chunks_in_another_order_and_place_are_restored_with_their_keys_turned(engine, reference):
    chunks(engine)
    answer = engine.add(PROMPT, drawing("v"), 3)
    got = pages(engine, answer, STOP)
    engine.run()
    engine.drain()
    recovery = answer.recovery
    assert recovery.reason is None
    assert (recovery.prefix_tokens, recovery.fresh_tokens, recovery.repair_tokens) == (0, 49, 0)
    assert (recovery.reused_tokens, recovery.source_tokens, recovery.restored_tokens) == (219, 219, 219)
    assert (recovery.sources, recovery.lost_sources, recovery.exact) == (["a", "b"], [], False)
    assert recovery.new_tokens == len(QUESTION)
    assert row_error(got[:, :, 168:268], turned(engine, engine.prefill_rows(A), 168)) < 1e-3
    assert row_error(got[:, :, 40:159], turned(engine, engine.prefill_rows(B), 39)[:, :, 1:]) < 1e-3
    assert row_error(got[:, :, 168:268], engine.prefill_rows(PROMPT)[:, :, 168:268]) > 0.1, "the test can fail"
    assert differs(reference, answer)


def test_rows_before_the_first_chunk_are_exact(engine):
    chunks(engine)
    answer = engine.add(PROMPT, drawing("v"), 3)
    got = pages(engine, answer, 40)
    engine.run()
    engine.drain()
    assert engine.version("v").exact_end == 40
    assert row_error(got, engine.prefill_rows(PROMPT[:40])) < 1e-3


def test_with_all_but_its_last_row_recomputed_the_prompt_is_that_of_a_full_prefill(engine):
    chunks(engine)
    everything = drawing("v", "edit_local", options={"k": 99})
    answer = engine.add([*SYSTEM, *B[:99], *JOIN, *A, *QUESTION], everything, 3)
    got = pages(engine, answer, 247)
    engine.run()
    engine.drain()
    assert (answer.recovery.repair_tokens, answer.recovery.reused_tokens) == (99 + 99, 1)
    assert row_error(got, engine.prefill_rows(answer.prompt[:247])) < 1e-3


def test_a_chunk_may_be_used_twice_and_its_version_shares_the_rows(engine):
    chunks(engine)
    prompt = [*SYSTEM, *A, *JOIN, *A[:80], *QUESTION]
    answer = engine.add(prompt, drawing("v"), 3)
    got = pages(engine, answer, 229)
    engine.run()
    engine.drain()
    rows = engine.prefill_rows(A)
    assert row_error(got[:, :, 40:140], turned(engine, rows, 40)) < 1e-3
    assert row_error(got[:, :, 149:229], turned(engine, rows, 149)[:, :, :80]) < 1e-3
    version = engine.version("v")
    (source,) = engine.version("a").extents
    places = [(e.position, e.length, e.generation) for e in version.extents if e.object_id == source.object_id]
    assert places == [(40, 100, 1), (149, 80, 1)]
    engine.check()


def test_a_parent_keeps_its_rows_and_what_it_lacks_comes_from_a_chunk(engine):
    first_version(engine)
    chunks(engine)
    prompt = [*OLD[:100], *A, *OLD[110:], *JOIN, *B, *QUESTION]
    answer = engine.ask(prompt, drawing("v", parent="v1"))
    recovery = answer.recovery
    assert recovery.reason is None
    assert (recovery.prefix_tokens, recovery.fresh_tokens, recovery.repair_tokens) == (100, 9, 0)
    assert (recovery.reused_tokens, recovery.source_tokens) == (100 + 190 + 120, 220)
    assert recovery.sources == ["a", "b"]
    assert engine.version("v").parent == "v1"
    assert engine.stored_error(engine.version("v"), 100) < 1e-3
    plain = engine.ask(prompt)
    assert plain.cached == 96


def test_another_version_is_a_source_like_any_other(engine):
    first_version(engine)
    first_version(engine, "other", text(200, seed=40))
    engine.forget_local()
    prompt = [*OLD[:100], *text(200, seed=40)[50:150], *OLD[100:]]
    answer = engine.ask(prompt, drawing("v", parent="v1", sources=["other"]))
    assert answer.recovery.source_tokens == 100
    assert answer.recovery.sources == ["other"]


def test_a_plan_restores_from_the_sources_that_it_needs_and_pins_no_other(engine):
    first_version(engine)
    chunks(engine)
    engine.add([*OLD[:100], *A, *OLD[110:]], drawing("v", parent="v1"))
    assert [engine.version(name).pins for name in ("v1", "a", "b")] == [1, 1, 0]
    engine.run()
    engine.drain()


# -- policies ----------------------------------------------------------------------------------------------------------

EVERYTHING = [
    ("cacheblend", {"share": 1.0, "check": 2}),
    ("mean_shift", {"share": 1.0}),
    ("attended", {"k": 10_000}),
    ("prophetkv", {"share": 1.0}),
    ("frontier", {"threshold": 1.0, "most_tokens": 10_000}),
]


@pytest.mark.parametrize(
    ("policy", "options", "joins"), [*((*each, 1) for each in EVERYTHING), *((*each, 4) for each in EVERYTHING[:2])]
)
def test_with_every_row_of_a_chunk_recomputed_the_prompt_is_that_of_a_full_prefill(
    engine, reference, policy, options, joins
):
    """Other policies compute what follows a later join once, before they choose: over rows that are still stale then."""
    first_version(engine)
    chunks(engine)
    prompt = [*OLD[:100], *JOIN, *B[1:], *QUESTION]
    if joins == 4:
        prompt = [*OLD[:100], *B[1:], *JOIN, *OLD[110:], *A, *QUESTION]
    answer = engine.ask(prompt, drawing("v", policy, options=options, parent="v1"))
    recovery = answer.recovery
    assert (recovery.reason, recovery.sources) == (None, ["b"] if joins == 1 else ["a", "b"])
    assert (recovery.reused_tokens, recovery.source_tokens, recovery.recompute_ratio) == (0, 0, 1.0)
    assert_exact(reference, answer)
    assert engine.stored_error(engine.version("v"), len(prompt)) < 1e-3


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("edit_local", {"k": 16}),
        ("edit_local_boundary", {}),
        ("epic", {"k": 16}),
        ("random", {}),
        ("structural", {}),
        ("patchkv", {"window": 16}),
        ("attention_blocks", {"k": 32}),
        ("edit_to_carrier", {"k": 64}),
        ("attended", {"k": 32}),
        ("prophetkv", {"share": 0.2}),
        ("cacheblend", {"share": 0.2}),
        ("frontier", {"most_tokens": 64}),
        ("mean_shift", {"share": 0.1}),
        ("mean_shift", {"selector": "epic"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_policy_works_on_chunks_and_keeps_them_to_itself(engine, reference, policy, options):
    for name, ids in (("a", A), ("b", B)):
        encode(engine, name, ids, precision="mixed")  # some policies rank by the attention that this measures
    engine.forget_local()
    boundaries = [("message", 0, 40), ("document", 40, 159), ("message", 159, len(PROMPT))]
    answer = engine.ask(PROMPT, drawing("v", policy, options=options, boundaries=boundaries))
    recovery = answer.recovery
    assert (recovery.reason, recovery.policy) == (None, policy)
    assert 0 < recovery.source_tokens == recovery.reused_tokens <= 219
    assert recovery.reused_tokens + recovery.repair_tokens == 219 or recovery.new_tokens > len(QUESTION)
    assert engine.audit(PROMPT)[1] < 1e-3
    assert_exact(reference, engine.ask(PROMPT))
    engine.check()


# -- who may see them --------------------------------------------------------------------------------------------------


def test_a_plain_request_with_the_same_text_sees_no_row_of_a_chunk(engine, reference):
    chunks(engine)
    approximate = engine.ask(PROMPT, drawing("v"), 40)
    plain = engine.ask(PROMPT)
    assert plain.cached == BLOCK, "the block before the first chunk"
    assert_exact(reference, plain, engine.ask(approximate.ids))
    assert engine.audit(PROMPT)[1] < 1e-3
    assert differs(reference, approximate)


def test_a_child_goes_on_from_the_rows_of_its_lineage_alone(engine, reference):
    chunks(engine)
    parent = engine.ask(PROMPT, drawing("v"))
    turn = text(50, seed=41)
    warm = engine.ask(parent.ids + turn, lossy("w", "v", "direct_reuse"))
    engine.forget_local()
    cold = engine.ask(parent.ids + turn, lossy("x", "v", "direct_reuse"))
    assert warm.recovery.local_tokens > cold.recovery.local_tokens == 0
    assert warm.tokens == cold.tokens
    exact = engine.ask(parent.ids + turn, ResumeParams(version="y", parent="v", sources=["a", "b"]))
    assert_exact(reference, exact, engine.ask(parent.ids + turn))


def test_two_versions_of_one_prompt_do_not_share_approximate_blocks(engine):
    chunks(engine)
    first = engine.ask(PROMPT, drawing("v"))
    again = engine.ask(PROMPT, drawing("w", "edit_local"))
    assert again.recovery.local_tokens == BLOCK
    third = engine.ask(PROMPT, drawing("x"))
    assert third.tokens == first.tokens


def test_children_of_an_approximate_parent_do_not_share_their_chunks_blocks(engine):
    chunks(engine)
    engine.ask(PROMPT, drawing("v"))
    encode(engine, "c", text(130, seed=45))
    prompt = [*PROMPT, *JOIN, *text(130, seed=45), *QUESTION]
    first = engine.ask(prompt, drawing("w", parent="v", sources=["c"]))
    other = engine.ask(prompt, drawing("x", "edit_local", parent="v", sources=["c"]))
    assert first.recovery.local_tokens == other.recovery.local_tokens == len(PROMPT) // BLOCK * BLOCK
    again = engine.ask(prompt, drawing("y", parent="v", sources=["c"]))
    assert again.tokens == first.tokens


@pytest.mark.parametrize("parent", [None, "v1"])
def test_the_exact_policy_takes_nothing_of_the_sources(engine, reference, parent):
    first_version(engine)
    chunks(engine)
    prompt = [*OLD[:100], *A, *OLD[110:], *B, *QUESTION]
    answer = engine.ask(prompt, drawing("v", "prefix_cache", parent=parent))
    assert "takes nothing of the sources" in answer.recovery.reason
    assert answer.recovery.exact
    assert answer.recovery.source_tokens == 0
    assert answer.recovery.restored_tokens == (100 if parent else 0)
    assert_exact(reference, answer)
    assert engine.version("v").exact_end == len(answer.ids) - 1


@pytest.mark.parametrize("policy", ["prefix_cache", "direct_reuse"])
def test_a_chunk_that_begins_the_prompt_is_its_exact_prefix(engine, reference, policy):
    chunks(engine)
    prompt = [*B, *JOIN, *A, *QUESTION]
    answer = engine.ask(prompt, drawing("v", policy))
    recovery = answer.recovery
    assert (recovery.prefix_tokens, recovery.sources[0]) == (120, "b")
    assert recovery.reused_tokens == (0 if policy == "prefix_cache" else 100)
    assert recovery.exact == (policy == "prefix_cache")
    if recovery.exact:
        assert_exact(reference, answer)
    assert engine.version("v").exact_end >= 120
    assert engine.stored_error(engine.version("v"), 120) < 1e-3
    assert_exact(reference, engine.ask(prompt))


def test_the_context_of_a_chunk_is_a_prefix_only_where_it_is_the_prompts(engine, reference):
    """Both prompts have the chunk's text where it was computed; one has other tokens before it."""
    encode(engine, "a", [*SYSTEM, *A])
    engine.forget_local()
    same = [*SYSTEM, *A, *QUESTION]
    other = [*SYSTEM[:-1], 7, *A, *QUESTION]
    right = engine.ask(same, drawing("v", "prefix_cache", sources=["a"]))
    assert (right.recovery.prefix_tokens, right.recovery.exact) == (140, True)
    engine.forget_local()
    wrong = engine.ask(other, drawing("w", sources=["a"]))
    assert (wrong.recovery.prefix_tokens, wrong.recovery.reused_tokens, wrong.recovery.exact) == (39, 100, False)
    assert engine.version("w").exact_end == 40, "the row of the token that differs is computed behind exact ones"
    engine.forget_local()
    exact = engine.ask(other, drawing("x", "prefix_cache", sources=["a"]))
    assert exact.recovery.restored_tokens == 39
    assert_exact(reference, right, exact, engine.ask(other))


def test_a_prompt_that_goes_on_from_its_parent_with_a_chunk_is_no_append(engine, reference):
    """The ids of parent and chunk, one after the other, are the prompt's: still only the parent's rows are exact."""
    encode(engine, "v1", OLD)
    encode(engine, "a", A)
    engine.forget_local()
    prompt = [*OLD, *A, *QUESTION]
    answer = engine.ask(prompt, drawing("v", parent="v1", sources=["a"]))
    assert (answer.recovery.prefix_tokens, answer.recovery.reused_tokens) == (300, 100)
    assert engine.version("v").exact_end == 300
    assert engine.ask(prompt).cached == 288
    assert_exact(reference, engine.ask(prompt))


# -- what is not there -------------------------------------------------------------------------------------------------


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
    from tests.engine.durable_kit import assert_idle, forget_memory, stores

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


# -- all of it ---------------------------------------------------------------------------------------------------------


def test_random_traffic_with_sources_leaves_everybody_elses_answers_exact(start_engine, tiny, reference):
    engine = start_engine(
        tiny("llama"), blocks=64, max_num_batched_tokens=192, extra={"host_bytes": 3 << 20, "save_tokens_per_step": 64}
    )
    rng = random.Random(5)
    units = [text(rng.randint(20, 110), seed=50 + i) for i in range(6)]
    exact: list[Answer] = []
    made: list[str] = []
    drew = 0
    for number in range(60):
        name = f"n{number}"
        order = rng.sample(range(6), rng.randint(1, 3))
        prompt = [*SYSTEM[: rng.randint(0, 40)]]
        for unit in order:
            prompt += [*units[unit][rng.randint(0, 3) :], *text(rng.randint(0, 6), seed=number)]
        kind = rng.choice(["chunk", "lossy", "lossy", "lossy", "exact", "plain"])
        if kind == "chunk":
            prompt = units[order[0]]
        names = [rng.choice(made) for _ in range(rng.randint(1, 4))] if made else []
        parent = rng.choice(made) if made and rng.random() < 0.4 else None
        policy = rng.choice(["direct_reuse", "edit_local", "epic"])
        given = {
            "chunk": ResumeParams(version=name),
            "lossy": ResumeParams(version=name, policy=policy, sources=names, parent=parent),
            "exact": ResumeParams(version=name, sources=names, parent=parent),
            "plain": None,
        }[kind]
        answer = engine.add(prompt, given, rng.choice([1, 6]))
        if kind in ("exact", "plain", "chunk"):
            exact.append(answer)
        if kind != "plain":
            made.append(name)
        if rng.random() < 0.2 and made:
            version = engine.version(rng.choice(made))
            if version is not None:
                engine.half.index.drop_version(version)
        if rng.random() < 0.1:
            engine.preempt()
        if rng.random() < 0.1 and not answer.done:
            engine.abort(answer)
        if rng.random() < 0.7:
            engine.run()
        if rng.random() < 0.2:
            engine.drain()
            engine.forget_local()
        drew += bool(answer.recovery and answer.recovery.source_tokens)
    engine.run()
    engine.drain()
    engine.check()
    assert drew > 5, "sources were drawn on"
    assert_exact(reference, *(answer for answer in exact if not answer.aborted))
    for version in [*engine.half.index._versions.values()]:
        assert engine.stored_error(version, version.exact_end) < 1e-3
    assert engine.half.index.load_plan(version, [AlignedRun(0, 0, len(version.token_ids))]) is not None
