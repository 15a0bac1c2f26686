import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentcache.episodes.buffers import Buffer

ids = st.lists(st.integers(0, 1), max_size=12)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30), ids), max_size=12))
def test_views_keep_their_tokens_however_the_buffers_go_on(steps):
    kept = [([], Buffer(np.empty(0, np.int32)))]
    for parent, cut, more in steps:
        tokens, buffer = kept[parent % len(kept)]
        tokens = tokens[:cut] + more
        kept.append((tokens, buffer.extended(np.array(tokens, np.int32))))
        views = [(tokens, buffer.view(0, len(tokens))) for tokens, buffer in kept]
        assert all(view.tolist() == tokens and not view.flags.writeable for tokens, view in views)


def test_an_append_goes_into_the_same_array_and_an_edit_does_not():
    first = Buffer(np.arange(100, dtype=np.int32))
    grown = first.extended(np.arange(110, dtype=np.int32))
    assert grown is not first
    assert grown.extended(np.arange(140, dtype=np.int32)) is grown
    assert grown.extended(np.arange(1, 150, dtype=np.int32)) is not grown
    assert grown.extended(np.arange(120, dtype=np.int32)) is not grown
