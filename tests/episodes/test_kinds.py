import pytest

from agentcache.episodes.diff import diff_tokens
from agentcache.episodes.kinds import classify
from agentcache.types import Boundary, BoundaryKind, MessageSpan, RevisionKind


def message(role, seed, length=40, message_id=None, tags=()):
    return role, [1000 * seed + i for i in range(length)], message_id, tags


def layout(messages):
    ids, spans = [], []
    for role, tokens, message_id, tags in messages:
        spans.append(MessageSpan(len(ids), len(ids) + len(tokens), role, str(tokens), message_id, tags))
        ids += tokens
    return ids, spans


def kind(old, new, reply=(), boundaries=()):
    (old_ids, old_spans), (new_ids, new_spans) = layout(old), layout(new)
    diff = diff_tokens([*old_ids, *reply], new_ids, anchors=(old_spans, new_spans))
    return classify(diff, len(old_ids), old_spans, new_spans, boundaries)


S, U, A, B = message("system", 1), message("user", 2, message_id="u"), message("assistant", 3), message("assistant", 4)
T, V = message("tool", 5, message_id="call"), message("tool", 6, message_id="call2")
W, X, Y = message("user", 7, message_id="w"), message("user", 8), message("assistant", 9)
REPLY = Y[1]
RESPELLED = ("assistant", [*Y[1][:9], 77, *Y[1][9:]], None, ())
OTHER_T = message("tool", 15, message_id="call")
OTHER_V = message("tool", 16)
SUMMARY = message("user", 17)
TAGGED = message("user", 18, tags=("lc_source=summarization",))
OTHER_S = message("system", 19)
OTHER_U = message("user", 20, message_id="u")
LONG_U = message("user", 21, 200)
MOVED_U = ("user", [*LONG_U[1][100:], *LONG_U[1][:100]], None, ())
GO_ON = message("user", 26)
MEMORY = message("user", 22, tags=("memory",))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([S, U], [S, U], "identical"),
        ([S, U], [S, U, A, W], "append"),
        ([S, U, A, T, B, W], [S, U, A, OTHER_T, B, W], "tool_result"),
        ([S, U, A, T, B, W], [S, U, A, OTHER_T, B, W, Y, X], "tool_result"),
        ([S, U, A, T], [S, U, A, OTHER_T, B, W], "tool_result"),
        ([S, U, A, T, B, W], [S, U, A, OTHER_T, B, W, Y, message("tool", 27, message_id="call")], "tool_result"),
        ([S, U, A, OTHER_V], [S, U, A, message("tool", 23)], "tool_result"),
        ([S, U, A, T, A, V, W], [S, U, A, OTHER_T, A, message("tool", 24, message_id="call2"), W], "tool_result"),
        ([S, U, A, W, B, X], [S, SUMMARY, B, X], "summarisation"),
        ([S, U, A, W, B, X], [S, SUMMARY, B, X, Y, message("user", 25)], "summarisation"),
        ([S, U, A, GO_ON, B, X], [S, SUMMARY, B, X, Y, GO_ON], "summarisation"),
        ([S, U, A, W], [S, TAGGED, W], "summarisation"),
        ([S, U, A], [OTHER_S, U, A], "memory"),
        ([S, U, A, W], [S, U, MEMORY, A, W], "memory"),
        ([S, LONG_U, A, W], [S, MOVED_U, A, W], "memory"),
        ([S, U, A, W, B, X], [S, W, B, X], "truncation"),
        ([S, U, A, W, B, X], [S, W, B, X, Y, SUMMARY], "truncation"),
        ([S, U, A, W], [S, U], "truncation"),
        ([S, U, A, W, B, X], [S, OTHER_U, A, W, B, X], "other"),
        ([S, U, A, W, B, X], [S, U, SUMMARY, A, W, B, X], "other"),
        ([S, U], [S, OTHER_U], "other"),
    ],
)
def test_kind_is_read_off_the_messages(old, new, expected):
    assert kind(old, new) == expected


def test_a_reply_in_its_own_tokens_is_an_append_and_in_others_a_retokenisation():
    assert kind([S, U], [S, U, Y, W], REPLY) == RevisionKind.APPEND
    assert kind([S, U], [S, U, RESPELLED, W], REPLY) == RevisionKind.RETOKENISATION


def test_a_reply_that_was_dropped_leaves_an_append():
    assert kind([S, U], [S, U, W], REPLY) == RevisionKind.APPEND


def test_asking_again_is_identical_whatever_was_replied():
    assert kind([S, U], [S, U], REPLY) == RevisionKind.IDENTICAL


def test_the_same_messages_in_other_tokens_are_a_retokenisation():
    ids, spans = layout([S, U, A, W])
    shorter = [*ids[:90], *ids[97:]]  # the template dropped the thinking of A
    spans_after = [*spans[:2], MessageSpan(80, 113, *_rest(spans[2])), MessageSpan(113, 153, *_rest(spans[3]))]
    diff = diff_tokens(ids, shorter, anchors=(spans, spans_after))
    assert classify(diff, len(ids), spans, spans_after) == RevisionKind.RETOKENISATION


def test_messages_in_another_order_are_memory():
    assert kind([S, U, W, X], [S, X, U, W]) == RevisionKind.MEMORY


def test_other_documents_in_a_user_message_are_memory():
    document = Boundary(BoundaryKind.DOCUMENT, 45, 75)
    assert kind([S, U], [S, OTHER_U], boundaries=[document]) == RevisionKind.MEMORY


def _rest(span):
    return span.role, span.content_hash, span.message_id, span.tags


a, b, c, d = (list(range(1000 * i, 1000 * i + 300)) for i in range(1, 5))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([*a, *b], [*a, *b], "identical"),
        ([*a, *b], [*a, *b, *c], "append"),
        ([*a, *b], a, "truncation"),
        ([*a, *b, *c], [*a, *c], "truncation"),
        ([*a, *b, *c], [*a, *c, *b], "memory"),
        ([*a, *b, *c], [*a, 1, 2, 3, *c, *d], "summarisation"),
        ([*a, *b, *c], [*a, *d, *c], "other"),
        (a, b, "other"),
    ],
)
def test_kind_of_bare_ids_is_read_off_the_diffs_shape(old, new, expected):
    assert classify(diff_tokens(old, new), len(old)) == expected


def test_bare_ids_that_keep_the_prompt_are_an_append_whatever_was_replied():
    assert classify(diff_tokens([*a, *b], [*a, *c]), len(a)) == RevisionKind.APPEND
