"""Rows of chunks and other versions in one prompt: right rows, turned by the right angle, under every policy."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.engine.chunk_kit import JOIN, PROMPT, QUESTION, STOP, SYSTEM, A, B, chunks, drawing, encode, pages, turned
from tests.engine.harness import OLD, assert_exact, differs, first_version, row_error, text

pytestmark = pytest.mark.engine

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
