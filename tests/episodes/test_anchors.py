import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.episodes.anchors import pair_messages
from agentcache.episodes.diff import diff_tokens
from agentcache.errors import ConfigError
from agentcache.types import AlignedRun, MessageSpan


def layout(*messages):
    """Returns (ids, spans) of messages given as (id, tokens)."""
    ids, spans = [], []
    for message_id, tokens in messages:
        spans.append(MessageSpan(len(ids), len(ids) + len(tokens), "tool", str(hash(tuple(tokens))), message_id))
        ids += tokens
    return ids, spans


T, U, V = list(range(100, 160)), list(range(200, 260)), list(range(300, 360))


def test_equal_messages_pair_by_id_before_content():
    _, old = layout(("a", T), ("b", T), (None, U))
    _, new = layout(("b", T), (None, U), ("c", T))
    pairs = pair_messages(old, new)
    assert [(o.message_id, n.message_id) for o, n in pairs] == [("b", "b"), (None, None), ("a", "c")]


def test_the_same_id_with_other_content_does_not_pair():
    _, old = layout(("a", T))
    _, new = layout(("a", U))
    assert pair_messages(old, new) == []


def test_ids_decide_which_of_two_equal_tool_results_stays():
    old, old_spans = layout(("s", [1] * 20), ("a", T), ("b", T), ("u", U))
    new, new_spans = layout(("s", [2] * 20), ("b", T), ("u", U), ("n", V))
    by_tokens = diff_tokens(old, new)
    assert by_tokens.aligned[0].old_start in (20, 80)
    by_id = diff_tokens(old, new, anchors=(old_spans, new_spans))
    assert by_id.aligned == (AlignedRun(80, 20, 120),)


def test_tokens_inside_a_changed_message_still_align():
    old, old_spans = layout(("s", U), ("a", T), ("u", V))
    new, new_spans = layout(("s", U), ("a", [*T[:20], 7, 8, *T[30:]]), ("u", V), ("n", [5] * 40))
    diff = diff_tokens(old, new, anchors=(old_spans, new_spans))
    assert diff.aligned == (AlignedRun(0, 0, 80), AlignedRun(90, 82, 90))


def test_a_message_that_moved_is_found_by_its_id_among_equal_ones():
    old, old_spans = layout(("x", [9] * 10), ("a", T), ("p", [6] * 10), ("u", [*U, *V]), ("b", T), ("y", [8] * 10))
    new, new_spans = layout(("z", [3] * 10), ("b", T), ("q", [5] * 12), ("u", [*U, *V]), ("w", [4] * 10))
    diff = diff_tokens(old, new, anchors=(old_spans, new_spans))
    assert diff.aligned == (AlignedRun(200, 10, 60), AlignedRun(80, 82, 120))


def test_a_suffix_inside_the_generation_prompt_alone_is_no_evidence():
    prompt = list(range(900, 910))
    old, old_spans = layout(("s", T), ("a", U), ("u", V))
    new, new_spans = layout(("s", T), ("a", U[::-1]), ("u", V), ("n", [5] * 40))
    with_turn = diff_tokens([*old, *prompt], [*new[:180], *prompt, *new[180:], *prompt])
    assert with_turn.aligned[-1].new_stop == 240, "without spans a common suffix is a suffix"
    spans = [*new_spans[:3], MessageSpan(190, 230, "user", "n", "n")]
    diff = diff_tokens([*old, *prompt], [*new[:180], *prompt, *new[180:], *prompt], anchors=(old_spans, spans))
    assert diff.aligned == (AlignedRun(0, 0, 60), AlignedRun(120, 120, 70))


@pytest.mark.parametrize("side", ["old", "new"])
@pytest.mark.parametrize("spans", [[(0, 5), (4, 6)], [(0, 11)], [(5, 4)]])
def test_spans_that_do_not_fit_are_refused(side, spans):
    bad = [MessageSpan(a, b, "user", "h") for a, b in spans]
    anchors = (bad, []) if side == "old" else ([], bad)
    with pytest.raises(ConfigError, match=f"{side} anchors"):
        diff_tokens(list(range(10)), list(range(10)), anchors=anchors)


messages = st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.lists(st.integers(0, 2), max_size=40)), max_size=6)


@given(messages, messages)
def test_anchors_never_break_the_diff(old_messages, new_messages):
    (old, old_spans), (new, new_spans) = layout(*old_messages), layout(*new_messages)
    diff = diff_tokens(old, new, anchors=(old_spans, new_spans))
    assert diff.prefix == diff_tokens(old, new).prefix
    assert diff.apply(old, [new[a:b] for a, b in diff.fresh]) == new
    assert all(run.length >= 8 for run in diff.suffix)
