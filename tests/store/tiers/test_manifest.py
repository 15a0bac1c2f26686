"""Manifests: what is written is read, and nothing else is believed."""

from __future__ import annotations

import base64
import json
import random
import re
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentcache.store.tiers import Manifest, ObjectEntry, Part, Refused, StoredExtent, new_key, payload_checksum
from agentcache.store.tiers.manifest import PackedIds, fingerprint_fault, version_name

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


def sample(seed: int = 0, objects: int = 3) -> Manifest:
    rng = np.random.default_rng(seed)
    entries, extents, at = [], [], 0
    for number in range(objects):
        parts = () if number == 0 else tuple(Part(int(rng.integers(1, 9999)), f"{number:016x}") for _ in range(2))
        entry = ObjectEntry(
            rng.bytes(16).hex(), 40, number * 7, bool(number % 2), ("exact", "k8v4")[number % 2], parts, ""
        )
        entries.append(entry)
        extents.append(StoredExtent(entry.key, number, 30, at, number))
        at += 30 + number
    return Manifest.draft(
        fingerprint={"model": "SmolLM2", "dtype": "bfloat16"},
        namespace="tenant",
        version=f"v{seed}",
        group="episode",
        parent="v",
        token_ids=rng.integers(0, 150_000, at + 3),
        exact_end=5,
        salts=[(4, b"\x00\xff")],
        extents=extents,
        objects=entries,
        ranks=2,
    )


def sealed(fields: dict[str, Any]) -> bytes:
    """Returns fields as a manifest whose checksum is right."""
    body = json.dumps(fields, separators=(",", ":")).encode()
    return body[:-1] + b',"checksum":"%b"}' % xxhash.xxh3_128_hexdigest(body).encode()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    namespace=NAMES,
    version=NAMES,
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300),
    fingerprint=st.dictionaries(NAMES, NAMES, max_size=5),
    salts=st.lists(st.tuples(st.integers(0, 999), st.binary(max_size=64)), max_size=4),
    generation=st.integers(0, 9),
)
def test_what_is_written_is_read(
    namespace: str,
    version: str,
    tokens: list[int],
    fingerprint: dict[str, str],
    salts: list[tuple[int, bytes]],
    generation: int,
) -> None:
    entry = ObjectEntry(new_key(), len(tokens), 0, True)
    made = Manifest.draft(
        fingerprint=fingerprint,
        namespace=namespace,
        version=version,
        token_ids=tokens,
        extents=[StoredExtent(entry.key, 0, len(tokens), 0, generation)],
        objects=[entry],
        salts=salts,
    )
    read = Manifest.decode(made.encode())
    assert read == made
    assert isinstance(read, Manifest)
    assert read.token_ids.tolist() == tokens
    assert [(index, bytes.fromhex(salt)) for index, salt in read.salts] == salts
    assert (
        len(made.encode()) <= made.cost_bytes + 6 * (len(namespace) + 2 * len(version)) + 400 * len(fingerprint) + 600
    )


def test_ten_thousand_mutated_manifests_are_refused() -> None:
    rng = random.Random(7)
    originals = [sample(seed).encode() for seed in range(10)]
    for number in range(10_000):
        data = bytearray(originals[number % 10])
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            at = rng.randrange(len(data))
            match rng.randrange(5):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    del data[at : at + rng.randrange(1, 60)]
                case 2:
                    data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
                case 3:
                    del data[at:]
                case _:
                    data[at : at + 20] = data[at : at + 20][::-1]
            data = data or bytearray(b"{")
        if bytes(data) != originals[number % 10]:
            assert isinstance(Manifest.decode(bytes(data)), Refused)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=40),
    st.just([]),
    st.just({}),
    st.just("0" * 32),
    st.lists(st.integers(-5, 300), max_size=5),
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, child in inner for path in paths(child, (*at, key)))]


@settings(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 5), data=st.data())
def test_changed_contents_with_a_right_checksum_are_refused_or_make_sense(seed: int, data: st.DataObject) -> None:
    fields = json.loads(sample(seed).model_dump_json())
    where = data.draw(st.sampled_from(paths(fields)[1:]))
    target = fields
    for key in where[:-1]:
        target = target[key]
    if data.draw(st.booleans()):
        target[where[-1]] = data.draw(LEAVES)
    elif isinstance(target, dict):
        target[data.draw(st.text(max_size=8))] = target.pop(where[-1])
    else:
        target.append(target[where[-1]])
    try:
        text = sealed(fields)
    except (ValueError, UnicodeEncodeError):
        return
    made = Manifest.decode(text)
    if isinstance(made, Refused):
        assert made.reason
        return
    rows = {entry.key: entry.tokens for entry in made.objects}
    assert all(e.offset + e.length <= rows[e.key] for e in made.extents)
    assert all(a.position + a.length <= b.position for a, b in zip(made.extents, made.extents[1:], strict=False))
    assert made.extents[-1].position + made.extents[-1].length <= len(made.token_ids)
    assert Manifest.decode(made.encode()) == made


def change(**fields: Any) -> bytes:
    return sealed(json.loads(sample().model_dump_json()) | fields)


def test_the_reason_says_what_is_wrong() -> None:
    def reason(data: bytes) -> tuple[str, str]:
        made = Manifest.decode(data)
        assert isinstance(made, Refused)
        return made.kind, made.reason

    assert reason(b"") == ("corrupt", "the manifest's checksum does not match: it was truncated or changed")
    assert reason(sample().encode()[:-1])[0] == "corrupt"
    assert reason(change(format=2)) == ("foreign", "it was stored in format 2; this release reads format 1")
    assert reason(change(format=2, unknown=1))[0] == "foreign"
    assert reason(change(format=1.0))[0] == "foreign"
    assert "exact_end" in reason(change(exact_end=-1))[1]
    assert "reach beyond" in reason(change(exact_end=10_000))[1]
    assert "no extent" in reason(change(extents=[]))[1]
    extents = json.loads(sample().model_dump_json())["extents"]
    assert "not ascending and disjoint at row 30" in reason(change(extents=extents[::-1]))[1]
    assert "reaches beyond object" in reason(change(extents=[[extents[0][0], 30, 11, 0, 0]]))[1]
    assert "listed twice" in reason(change(objects=json.loads(sample().model_dump_json())["objects"] * 2))[1]
    assert reason(sealed({"fingerprint": {}}))[1].startswith("the manifest is malformed")
    assert "format" not in reason(b"[" * 100_000)[1]


def test_nesting_and_size_are_bounded() -> None:
    nested = b'{"a":' + b"[" * 200_000
    body = nested + b"}"
    text = nested + b',"checksum":"%b"}' % xxhash.xxh3_128_hexdigest(body).encode()
    assert isinstance(Manifest.decode(text), Refused)
    assert "at most" in str(Manifest.decode(b"x" * ((64 << 20) + 1)))


def test_token_ids_are_bounded_before_they_are_inflated() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(50_000_000))).decode()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not 3 token ids"):
            PackedIds(length=3, data=bomb, checksum="0" * 16).unpack()
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"data": "!!!"}, "base64|characters|padding|data"),
        ({"data": base64.b64encode(b"no zlib").decode()}, "inflated"),
        ({"length": 4}, "not 4 token ids"),
        ({"checksum": "0" * 16}, "checksum"),
        ({"data": base64.b64encode(zlib.compress(bytes(12)) + b"x").decode()}, "not 3"),
    ],
)
def test_token_ids_that_are_not_what_was_packed_are_refused(fields: dict[str, Any], match: str) -> None:
    packed = PackedIds.pack([1, 2, 3])
    with pytest.raises(ValueError, match=match):
        packed.model_copy(update=fields).unpack()


def test_negative_token_ids_are_refused() -> None:
    with pytest.raises(ValidationError, match="negative"):
        Manifest.draft(fingerprint={}, namespace="n", version="v", token_ids=[-1], extents=[], objects=[])


def test_names_tell_all_ids_apart() -> None:
    ids = ["", "a", "b", "ab", "a\0", "\0a", "ä", "\ud800", "\udfff", "../x"]
    names = {version_name(namespace, version) for namespace in ids for version in ids}
    assert len(names) == len(ids) ** 2
    assert all(re.fullmatch(r"[0-9a-f]{40}", name) for name in names)


def test_a_payload_has_another_checksum_in_anothers_place() -> None:
    blob = np.arange(100, dtype=np.uint8)
    one, two = new_key(), new_key()
    sums = {payload_checksum(key, rank, blob) for key in (one, two) for rank in (0, 1)}
    assert len(sums) == 4
    assert payload_checksum(one, 0, blob) == payload_checksum(one, 0, blob.copy())


def test_a_fingerprint_names_every_difference() -> None:
    fault = fingerprint_fault({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"})
    assert fault == "it was stored for another engine: b '2', here '9'; c '3', here None; d None, here '4'"
    assert fingerprint_fault({"a": "1"}, {"a": "1"}) is None
