"""Salted hashes on vLLM's own Request and block hasher."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from agentcache.engine.commits import lineage_salts, salt_request, version_salt

BLOCK = 4


def _hash(value):
    import hashlib

    return hashlib.sha256(repr(value).encode()).digest()


@pytest.fixture(scope="module", autouse=True)
def none_hash():
    init_none_hash(_hash)


def make(ids, request_id="r"):
    init_none_hash(_hash)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(ids),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, _hash),
    )


def test_only_hashes_from_the_salt_on_differ():
    plain, salted = make(range(40)), make(range(40))
    salt_request(salted, ((3, b"s" * 16),))
    assert salted.block_hashes[:3] == plain.block_hashes[:3]
    assert len(salted.block_hashes) == len(plain.block_hashes) == 10
    assert not set(salted.block_hashes[3:]) & set(plain.block_hashes)


def test_a_partial_tail_is_salted_when_decode_fills_it():
    plain, salted = make(range(14)), make(range(14))
    salt_request(salted, ((3, b"s" * 16),))  # block 3 holds two prompt tokens only
    assert salted.block_hashes == plain.block_hashes  # nothing approximate is full yet
    for request in (plain, salted):
        for token in (100, 101, 102, 103, 104, 105):
            request.append_output_token_ids(token)
    assert len(salted.block_hashes) == len(plain.block_hashes) == 5
    assert salted.block_hashes[:3] == plain.block_hashes[:3]
    assert not set(salted.block_hashes[3:]) & set(plain.block_hashes)


def test_equal_salts_find_each_other_and_different_ones_do_not():
    a, b, c = make(range(32)), make(range(40)), make(range(32))
    salt_request(a, ((2, b"s" * 16), (5, b"t" * 16)))
    salt_request(b, ((2, b"s" * 16), (5, b"t" * 16)))
    salt_request(c, ((2, b"s" * 16), (5, b"u" * 16)))
    assert b.block_hashes[: len(a.block_hashes)] == a.block_hashes
    assert c.block_hashes[:5] == a.block_hashes[:5]
    assert c.block_hashes[5] != a.block_hashes[5]


@given(
    length=st.integers(1, 60),
    salts=st.dictionaries(st.integers(0, 18), st.binary(min_size=16, max_size=16), min_size=1, max_size=4),
    chunks=st.lists(st.integers(1, 9), max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_hashing_in_steps_gives_the_chain_of_hashing_at_once(length, salts, chunks):
    ordered = tuple(sorted(salts.items()))
    grown = make(range(length))
    salt_request(grown, ordered)
    total = length
    for chunk in chunks:
        grown.append_output_token_ids(list(range(total, total + chunk)))
        total += chunk
    whole = make(range(total))
    salt_request(whole, ordered)
    assert grown.block_hashes == whole.block_hashes


@given(
    prefix=st.integers(0, 80),
    first=st.integers(0, 120),
    parent_first=st.integers(0, 120),
    reused=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_approximate_block_is_salted(prefix, first, parent_first, reused):
    parent = ((parent_first // BLOCK, b"p" * 16),)
    if parent_first >= prefix and not reused:
        return  # such a plan is exact
    approximate = parent_first if parent_first < prefix else max(first, prefix)
    salts = lineage_salts(
        parent,
        prefix=prefix,
        restored_after_prefix=reused,
        first_approximate=approximate,
        block_size=BLOCK,
        own=b"o" * 16,
    )
    assert [i for i, _ in salts] == sorted({i for i, _ in salts})
    assert salts[0][0] <= approximate // BLOCK
    if reused:  # the blocks behind P are this version's alone
        assert (max(approximate, prefix) // BLOCK, b"o" * 16) in salts
    if parent_first // BLOCK * BLOCK < prefix and parent_first < prefix // BLOCK * BLOCK:
        assert parent[0] in salts  # blocks wholly inside P are shared with the parent


def test_an_exact_plan_has_no_salts():
    own = version_salt("n", "v", "d")
    assert (
        lineage_salts(
            ((1, b"x"),), prefix=2, restored_after_prefix=True, first_approximate=None, block_size=BLOCK, own=own
        )
        == ()
    )


def test_salts_depend_on_every_part():
    parts = ("n", "v", "d", "e")
    base = version_salt(*parts)
    assert len(base) == 16
    for i in range(4):
        changed = list(parts)
        changed[i] += "x"
        assert version_salt(*changed) != base
    assert version_salt("a", "bc", "") != version_salt("ab", "c", "")
