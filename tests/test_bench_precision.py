"""The parts of `agentcache bench precision` that need no engine."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
from rich.console import Console

from agentcache.bench_precision import _print, relative_errors, stored_rows
from agentcache.errors import AgentCacheError
from agentcache.kernels import PackedRun, Tag
from agentcache.kernels.reference import pack
from agentcache.store.payloads import Payload, encode_payload
from agentcache.store.tiers import Manifest, ObjectEntry, StoredExtent, new_key
from agentcache.store.tiers.memory import MemoryStore

FINGERPRINT = {"model": "m"}
LAYERS, HEADS, DIM = 2, 3, 64


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn((LAYERS, HEADS, 100, DIM), generator=generator).bfloat16() for _ in range(2))
    return k, v


def stored(k: torch.Tensor, v: torch.Tensor, tag: Tag) -> MemoryStore:
    """Returns a store with version `v` of these rows in two objects, the later one's listed first."""
    store = MemoryStore(1 << 24, fingerprint=FINGERPRINT)
    spans = {new_key(): (64, 100), new_key(): (0, 64)}
    draft = Manifest.draft(
        fingerprint=FINGERPRINT,
        namespace="n",
        version="v",
        token_ids=list(range(100)),
        extents=[StoredExtent(key, 0, b - a, a) for key, (a, b) in sorted(spans.items(), key=lambda item: item[1])],
        objects=[ObjectEntry(key, b - a, a, True, str(tag)) for key, (a, b) in spans.items()],
    )
    ticket = store.prepare(draft, 1 << 20)
    assert isinstance(ticket, str)
    for key, (a, b) in spans.items():
        run = PackedRun(tag, b - a, pack(k[:, :, a:b], v[:, :, a:b], tag).flatten())
        store.put(ticket, key, 0, encode_payload(Payload((run,))))
    assert isinstance(store.complete(ticket), Manifest)
    return store


def test_exact_rows_come_back_in_their_order(rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    got = stored_rows(stored(*rows, Tag.EXACT), "n", "v", heads=HEADS, head_dim=DIM, layers=LAYERS)
    assert torch.equal(got["keys"], rows[0].float())
    assert torch.equal(got["values"], rows[1].float())
    assert relative_errors(got, got, 100)["keys"] == {"mean": 0.0, "worst_layer": 0.0}


def test_errors_are_relative_by_tensor_and_layer(rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    k, v = (tensor.float() for tensor in rows)
    worse = v.clone()
    worse[1] *= 1.5
    worse[:, :, 90:] = 0
    found = relative_errors({"keys": k, "values": v}, {"keys": k, "values": worse}, 90)
    assert found["keys"] == {"mean": 0.0, "worst_layer": 0.0}
    assert found["values"]["worst_layer"] == pytest.approx(0.5)
    assert found["values"]["mean"] == pytest.approx(0.25)


def test_four_bits_lose_more_of_the_values_and_no_more_of_the_keys(rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    got = {
        tag: stored_rows(stored(*rows, tag), "n", "v", heads=HEADS, head_dim=DIM, layers=LAYERS)
        for tag in (Tag.EXACT, Tag.K8V8, Tag.K8V4)
    }
    eight, four = (relative_errors(got[Tag.EXACT], got[tag], 100) for tag in (Tag.K8V8, Tag.K8V4))
    assert 0 < four["keys"]["mean"] == eight["keys"]["mean"] < 0.02
    assert 5 * eight["values"]["mean"] < four["values"]["mean"] < 0.2


def test_a_version_that_is_not_there_is_an_error(rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(AgentCacheError, match="was not stored"):
        stored_rows(stored(*rows, Tag.EXACT), "n", "other", heads=HEADS, head_dim=DIM, layers=LAYERS)


def test_both_are_printed() -> None:
    console = Console(file=StringIO(), width=100)
    error = {"keys": {"mean": 0.0041, "worst_layer": 0.0048}, "values": {"mean": 0.1052, "worst_layer": 0.15}}
    row = {"precision": "k8v4", "error": error, "kl": 0.0076}
    _print({"model": "m", "tokens": 8, "prompts": 2, "rows": [row], "kl_exact": 0.001}, console)
    assert isinstance(console.file, StringIO)
    line = next(line for line in console.file.getvalue().splitlines() if "k8v4" in line)
    assert line.split() == ["k8v4", "0.0041", "0.0048", "0.1052", "0.1500", "0.0076"]
