"""Who sees rows of chunks: nobody who did not ask, no other lineage, and the exact policy only those of an exact prefix."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from tests.engine.chunk_kit import JOIN, PROMPT, QUESTION, SYSTEM, A, B, chunks, drawing, encode
from tests.engine.harness import BLOCK, OLD, assert_exact, differs, first_version, lossy, text

pytestmark = pytest.mark.engine


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
