"""Payloads: what they say of themselves, their bytes for a tier, and the store that holds them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentcache.kernels import PackedRun, Tag
from agentcache.store.payloads import (
    BLOB_VERSION,
    Payload,
    PayloadStore,
    decode_payload,
    encode_payload,
    is_intact,
)

HEAD = 16
ENTRY = 28


def run(tag: str, tokens: int, data: bytes) -> PackedRun:
    return PackedRun(
        tag, tokens, torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )


@st.composite
def payloads(draw):
    names = st.sampled_from([*map(str, Tag), "int8", "fp8_e4m3"])
    runs = tuple(
        run(draw(names), draw(st.integers(1, 64)), draw(st.binary(max_size=40))) for _ in range(draw(st.integers(1, 5)))
    )
    tokens = sum(r.tokens for r in runs)
    residual = draw(st.none() | st.binary(min_size=tokens, max_size=tokens))
    return Payload(runs, 0, None if residual is None else np.frombuffer(residual, dtype=np.uint8))


def same(a: Payload, b: Payload) -> bool:
    residuals = (a.residual is None) == (b.residual is None) and (
        a.residual is None or np.array_equal(a.residual, b.residual)
    )
    runs = [[(str(r.tag), r.tokens, r.data.numpy().tobytes()) for r in p.runs] for p in (a, b)]
    return residuals and runs[0] == runs[1]


@given(payloads())
def test_a_payload_comes_back_from_its_bytes(payload):
    blob = encode_payload(payload)
    back = decode_payload(blob)
    assert same(payload, back)
    assert (back.tokens, back.size_bytes, back.tag, back.lossless) == (
        payload.tokens,
        payload.size_bytes,
        payload.tag,
        payload.lossless,
    )
    assert back.checksum and is_intact(back)
    blob[:] = 0
    assert same(payload, back), "it must not share memory with the bytes"


@given(payloads())
def test_no_prefix_of_the_bytes_and_no_longer_string_is_taken(payload):
    blob = encode_payload(payload)
    for length in {0, 1, HEAD - 1, HEAD, len(blob) // 2, len(blob) - 1} - {len(blob)}:
        with pytest.raises(ValueError, match="payload"):
            decode_payload(blob[:length])
    with pytest.raises(ValueError, match="payload"):
        decode_payload(np.append(blob, np.uint8(0)))


@given(payloads(), st.data())
def test_no_change_of_a_head_crashes(payload, data):
    blob = encode_payload(payload)
    table = HEAD + ENTRY * len(payload.runs)
    at = data.draw(st.integers(0, table - 1))
    blob[at] = data.draw(st.integers(0, 255))
    try:
        back = decode_payload(blob)
    except ValueError:
        return
    assert sum(r.tokens for r in back.runs) == back.tokens


def test_the_layout_is_that_of_the_description():
    payload = Payload((run("k8v4", 2, b"abc"), run("exact", 1, b"de")), 0, np.array([7, 8, 9], dtype=np.uint8))
    assert encode_payload(payload).tobytes() == (
        b"ACKV"
        + struct.pack("<HHII", 1, 1, 3, 2)
        + b"k8v4".ljust(16, b"\0")
        + struct.pack("<IQ", 2, 3)
        + b"exact".ljust(16, b"\0")
        + struct.pack("<IQ", 1, 2)
        + bytes([7, 8, 9])
        + b"abcde"
    )
    assert BLOB_VERSION == 1


@pytest.mark.parametrize(("at", "value"), [(0, ord("X")), (4, 2), (6, 2)])
def test_another_magic_version_or_flag_is_refused(at, value):
    blob = encode_payload(Payload((run("exact", 1, b"ab"),)))
    blob[at] = value
    with pytest.raises(ValueError, match="version 1"):
        decode_payload(blob)


def test_a_payload_of_several_precisions_is_mixed_and_lossy():
    assert Payload((run("exact", 1, b"a"), run("exact", 1, b"a"))).tag == "exact"
    assert Payload((run("exact", 1, b"a"),)).lossless
    mixed = Payload((run("exact", 1, b"a"), run("k8v8", 1, b"a")))
    assert mixed.tag == "mixed"
    assert not mixed.lossless
    assert not Payload((run("k8v4", 1, b"a"),)).lossless


def test_residuals_count_as_bytes_but_not_as_rows_of_a_precision():
    store = PayloadStore()
    payload = store.put(1, [run("k8v4", 3, b"abc"), run("exact", 1, b"de")], np.zeros(4, dtype=np.uint8))
    assert payload.size_bytes == store.size_bytes == 9
    assert store.tag_bytes() == {"k8v4": 3, "exact": 2}
    store.drop(1)
    assert (len(store), store.size_bytes, store.tag_bytes()) == (0, 0, {})
    store.drop(1)


@pytest.mark.parametrize("part", ["first run", "last run", "residual"])
def test_a_flipped_bit_is_found_wherever_it_is(part):
    store = PayloadStore()
    payload = store.put(1, [run("exact", 2, b"abcd"), run("k8v8", 1, b"xyz")], np.zeros(3, dtype=np.uint8))
    assert store.intact(1)
    target = {
        "first run": payload.runs[0].data.numpy(),
        "last run": payload.runs[1].data.numpy(),
        "residual": payload.residual,
    }
    target[part][-1] ^= 1
    assert not store.intact(1)


def test_without_verification_nothing_is_compared():
    store = PayloadStore(verify=False)
    payload = store.put(1, [run("exact", 1, b"ab")])
    payload.runs[0].data[0] ^= 1
    assert payload.checksum == 0
    assert store.intact(1)
    assert not store.intact(2)


def test_a_payload_of_a_tier_keeps_its_checksum():
    store = PayloadStore()
    payload = decode_payload(encode_payload(Payload((run("exact", 1, b"ab"),))))
    assert store.add(5, payload) is payload is store.get(5)
    assert store.intact(5)
    store.clear()
    assert store.get(5) is None and not store.intact(5)
