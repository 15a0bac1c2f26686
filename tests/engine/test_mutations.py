"""Manifests and parameters changed at random, ten thousand of each, before a scheduler half: no crash, no hang, nothing left."""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import xxhash

from agentcache.engine.wire import ResumeParams
from agentcache.store.tiers import Manifest, Miss, ObjectEntry, Part, Refused, StoredExtent
from agentcache.store.tiers.manifest import PackedIds, new_key
from agentcache.store.tiers.memory import MemoryStore
from tests.engine.desk import FINGERPRINT, ROW_BYTES, Desk
from tests.engine.durable_kit import assert_healthy, assert_idle, forget_memory, put_down, stores
from tests.engine.harness import NEW, OLD, assert_exact

POLICIES = ("prefix_cache", "edit_local", "direct_reuse")


class Told(MemoryStore):
    """Finds whatever manifest a test gives it, as a server would that somebody else has written to."""

    def __init__(self) -> None:
        super().__init__(1 << 30, fingerprint=FINGERPRINT)
        self.raw = b""

    def _find(self, namespace: str, version: str) -> Manifest | Miss | Refused:
        return Manifest.decode(self.raw)


def manifest(exact_end: int = 300, *, attention: bool = True) -> Manifest:
    """Returns what an engine stores of OLD: an exact head, and a tail that is exact up to `exact_end`."""
    cuts = sorted({0, exact_end, 256, 300})
    objects, extents = [], []
    for start, stop in pairwise(cuts):
        entry = ObjectEntry(
            new_key(), stop - start, start, stop <= exact_end, "exact", (Part((stop - start) * ROW_BYTES, "0" * 16),)
        )
        objects.append(entry)
        extents.append(StoredExtent(entry.key, 0, stop - start, start))
    return Manifest.draft(
        fingerprint=FINGERPRINT,
        namespace="default",
        version="v1",
        group="episode",
        token_ids=OLD,
        extents=extents,
        objects=objects,
        exact_end=exact_end,
        salts=[] if exact_end == 300 else [(exact_end // 32, b"salt"), (9, b"more")],
        attention=np.arange(300, dtype=np.uint8) if attention else None,
    )


def sealed(body: bytes) -> bytes:
    """Returns a JSON object with the checksum that a store looks for."""
    return body[:-1] + b',"checksum":"%b"}' % xxhash.xxh3_128_hexdigest(body).encode()


# -- mutations ---------------------------------------------------------------------------------------------------------


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Returns bytes with a flip, a cut, a repetition, a swap or noise."""
    at, size = rng.randrange(len(data)), rng.randrange(1, 40)
    match rng.randrange(6):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[at + size :]
        case 3:
            return data[:at] + data[at : at + size] + data[at:]
        case 4:
            return data[:at] + rng.randbytes(size) + data[at + size :]
        case _:
            other = rng.randrange(len(data))
            a, b = sorted((at, other))
            return data[:a] + data[b:] + data[a:b]


NUMBERS = (
    -1,
    0,
    1,
    31,
    32,
    255,
    256,
    257,
    300,
    301,
    1 << 24,
    (1 << 24) + 1,
    1 << 31,
    1 << 48,
    1 << 62,
    1 << 63,
    10**40,
)
OTHERS: tuple[Any, ...] = (None, True, "", "x", [], {}, 0.5, [[]], {"a": []}, "\u0000", "9" * 3000)


def changed_value(value: Any, rng: random.Random) -> Any:
    """Returns another value in a value's place, mostly of its type."""
    if rng.random() < 0.15:
        return deepcopy(rng.choice(OTHERS))
    match value:
        case bool():
            return not value
        case int():
            return rng.choice([*NUMBERS, value - 1, value + 1, value + rng.randrange(-40, 40), float(value)])
        case str():
            at = rng.randrange(len(value) + 1)
            letter = rng.choice(string.hexdigits + string.punctuation + "\u0661\u00e9 ")
            return rng.choice([value[:at] + letter + value[at + 1 :], value[:at], value + value, letter * 1025])
        case list():
            some = [rng.choice(value)] if value else []
            shuffled = rng.sample(value, len(value))
            return rng.choice([value + some, value[1:], value[:-1], shuffled, value[::-1], value * 3, []])
        case dict():
            left = dict(rng.sample([*value.items()], max(len(value) - 1, 0)))
            return rng.choice([left, value | {"other": 1}, [*value.values()]])
    return rng.choice(NUMBERS)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every container and key of a JSON tree."""
    items = [*tree.items()] if isinstance(tree, dict) else [*enumerate(tree)] if isinstance(tree, list) else []
    for key, value in items:
        yield tree, key
        yield from places(value)


def changed_tree(tree: Any, rng: random.Random) -> Any:
    """Returns a JSON tree with one to three values changed."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        container, key = rng.choice([*places(tree)] or [({"": tree}, "")])
        container[key] = changed_value(container[key], rng)
    return tree


def changed_ids(tree: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns a manifest's tree of other, or of more or fewer token ids, packed rightly."""
    ids = OLD[: rng.choice([0, 1, 290, 299, 300])] + [rng.randrange(1 << 31)] * rng.choice([0, 0, 1, 300])
    return {**tree, "tokens": PackedIds.pack(np.asarray(ids, dtype=np.int32)).model_dump(mode="json")}


def mutated(base: Manifest, rng: random.Random, *, ids: bool = True) -> bytes:
    """Returns a manifest's bytes, changed; most of them with a seal that holds. Token ids are forged with `ids` only."""
    raw = base.encode()
    tree = base.model_dump(mode="json")
    match rng.randrange(8):
        case 0 | 1:
            return changed_bytes(raw, rng)
        case 2:
            return sealed(changed_bytes(base.model_dump_json().encode(), rng))
        case 3 if ids:
            tree = changed_ids(tree, rng)
        case 4:  # what says where rows are
            for kind in ("extents", "objects"):
                entry = rng.choice(tree[kind])
                at = rng.randrange(1, 5 if kind == "extents" else 4)
                entry[at] = changed_value(entry[at], rng)
        case _:
            tree = changed_tree(tree, rng)
    return sealed(json.dumps(tree).encode())


# -- manifests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_mutated_manifests(told: Told, part: int) -> None:
    desk = Desk(told)
    rng = random.Random(part)
    bases = [manifest(), manifest(100), manifest(290, attention=False)]
    reasons: Counter[str] = Counter()
    for number in range(2500):
        told.raw = mutated(rng.choice(bases), rng)
        desk.losing = rng.randrange(2)
        payload = {"version": f"n{number}", "parent": "v1", "policy": rng.choice(POLICIES), "save": rng.random() < 0.3}
        answer = desk.serve(NEW, payload)
        reasons[(answer.reason or "").partition(": ")[0].lstrip("0123456789 ")] += 1
        if rng.random() < 0.5:
            desk.half.reset()
        desk.drain()
        desk.half.index.clear()
        desk.drain()
        desk.check()
        assert desk.half.index.stats()["objects"] == 0
    believed = reasons[""] + reasons["stored rows were lost or corrupt and were recomputed"]
    assert believed > 200, f"too few mutated manifests were believed to test what comes then: {reasons}"
    assert reasons["parent 'v1' cannot be restored"] > 1000, reasons
    desk.close()


@pytest.mark.engine
@pytest.mark.parametrize("precision", ["exact", pytest.param("k8v4", marks=pytest.mark.slow)])
def test_mutated_manifests_on_the_engine_harm_no_answer(
    start_engine, tiny, reference, tmp_path, monkeypatch, precision
):
    """An answer that calls itself exact is: whatever of positions, tags, sizes or flags a sealed manifest lies about."""
    engine = start_engine(tiny("llama"), extra={"store": f"disk://{tmp_path / 'store'}?fsync=false"})
    base = put_down(engine, precision=precision)
    scheduler, _ = stores(engine)
    rng = random.Random(7)
    outcomes: Counter[str] = Counter()
    for number in range(200):
        raw = mutated(base, rng, ids=False)
        while number % 2 and isinstance(Manifest.decode(raw), Refused):
            raw = mutated(base, rng, ids=False)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "_find", lambda *_, raw=raw: Manifest.decode(raw))
            params = ResumeParams(version=f"n{number}", parent="v1", policy=rng.choice(POLICIES), save=number % 4 == 0)
            answer = engine.ask(NEW, params, n=3)
        outcomes[f"{answer.recovery.exact} {answer.recovery.restored_tokens > 0}"] += 1
        if answer.recovery.exact:
            assert_exact(reference, answer)
        if number % 10 == 0:
            assert_exact(reference, engine.ask(NEW, n=3))
            assert engine.audit(NEW)[1] < 1e-3
        forget_memory(engine)
        assert_idle(engine)
    assert outcomes["False True"] > 20, outcomes
    assert outcomes["True True"] > 10 or precision == "k8v4", outcomes
    assert_healthy(engine, reference)
    start_engine.stop()


# -- parameters --------------------------------------------------------------------------------------------------------

BASES: tuple[dict[str, Any], ...] = (
    {"parent": "v1"},
    {
        "parent": "v1",
        "namespace": "default",
        "episode": "episode",
        "policy": "edit_local",
        "options": {"k": 8},
        "aligned": [[0, 0, 100], [110, 120, 190]],
        "boundaries": [["message", 0, 100], ["tool_result", 100, 120], ["message", 120, 310]],
        "save": True,
        "precision": "k8v4",
        "salt": "s",
    },
    {"parent": "v2", "policy": "edit_local", "options": {"to": "boundary"}, "save": False},
    {
        "parent": "v2",
        "policy": "direct_reuse",
        "aligned": [[0, 0, 50], [50, 50, 50], [120, 120, 190]],
    },
    {"parent": "v1", "sources": ["v2", "nobody"], "policy": "direct_reuse", "aligned": [[0, 0, 100]]},
    {"sources": ["v1", "v2", "v1"], "policy": "edit_local"},
)


@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_mutated_parameters(part: int) -> None:
    """Every row that is copied is one of the same tokens, whatever is asked for; the half lives and holds nothing."""
    desk = Desk(host_bytes=100_000)
    rng = random.Random(100 + part)
    outcomes: Counter[str] = Counter()
    for number in range(2500):
        if desk.half.index.lookup("default", "v2") is None or rng.random() < 0.02:
            desk.half.reset()
            desk.drain()
            assert desk.serve(OLD, {"version": "v1"}).saved == "pending"
            desk.drain()
            assert desk.serve(NEW, {"version": "v2", "parent": "v1", "policy": "edit_local"}).reused_tokens > 100
            desk.drain()
        payload = changed_tree({"version": f"n{number}", **rng.choice(BASES)}, rng)
        answer = desk.serve(rng.choice([OLD, NEW, NEW[:101], NEW[50:]]), payload)
        outcomes["malformed" if (answer.reason or "").startswith("malformed") else f"reused {not answer.exact}"] += 1
        desk.drain()
        desk.check()
    assert min(outcomes[each] for each in ("malformed", "reused True", "reused False")) > 250, outcomes
    desk.close()
