"""The façade: what it chooses, what it refuses, and that a refusal changes nothing."""

import logging
import sys

import pytest
import torch

from agentcache.kernels import COMPARISON, Kernels, PackedRun, Piece, Source, TableRotation, Tag
from agentcache.kernels.dispatch import _say_once
from tests.kernels.cases import bits, make_layout, make_pages, poisoned

LAYOUT = make_layout("cpu", 2, 32, 64, 6)
ROTATION = TableRotation.from_theta(64, 256)


def kernels(implementation="reference", **changes):
    given = {"layers": 2, "dtype": torch.bfloat16, "rotation": ROTATION, "implementation": implementation, **changes}
    return Kernels(LAYOUT, **given)


@pytest.fixture(scope="module")
def pages():
    return make_pages(LAYOUT, 2, 6, torch.bfloat16, 0)


def test_auto_takes_the_fast_one_and_says_so_once(caplog):
    _say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="agentcache.kernels.dispatch"):
        assert [kernels("auto").implementation for _ in range(2)] == ["numba"] * 2
    assert [record.message for record in caplog.records] == ["numba kernels on cpu"]


def test_auto_falls_back_aloud_where_numba_is_missing(monkeypatch, caplog):
    _say_once.cache_clear()
    monkeypatch.setitem(sys.modules, "agentcache.kernels.cpu_backend", None)
    with caplog.at_level(logging.INFO, logger="agentcache.kernels.dispatch"):
        assert kernels("auto").implementation == "reference"
    assert "many times slower" in caplog.text


def test_a_named_implementation_never_falls_back(monkeypatch):
    monkeypatch.setitem(sys.modules, "agentcache.kernels.cpu_backend", None)
    with pytest.raises(RuntimeError, match="install numba"):
        kernels("numba")


def test_triton_refuses_the_cpu():
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="run on cuda, not on cpu"):
        kernels("triton")


def test_numba_refuses_a_gpu():
    with pytest.raises(RuntimeError, match="run on cpu, not on cuda"):
        kernels("numba", device="cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "cuda"}, "choose one of auto, reference, numba, triton"),
        ({"dtype": torch.int8}, "bfloat16, float16 or float32"),
        ({"rotation": TableRotation.from_theta(128, 4)}, "rotary_dim=128 does not fit"),
    ],
)
def test_refuses_a_wrong_setting(changes, message):
    with pytest.raises(ValueError, match=message):
        kernels(**changes)


@pytest.mark.parametrize("name", ["reference", "numba"])
@pytest.mark.parametrize(
    ("source", "table", "message"),
    [
        (Source(-1, 4, "exact"), range(6), "reaches out of a page table of 192 tokens"),
        (Source(190, 3, "exact"), range(6), "reaches out of a page table of 192 tokens"),
        (Source(0, 0, "exact"), range(6), "reaches out"),
        (Source(0, 4, "k4v4"), range(6), "k4v4"),
        (Source(0, 4, "exact"), [6], "page 6 lies outside"),
        (Source(0, 4, "exact"), [-1], "page -1 is negative"),
    ],
)
def test_refuses_sources_out_of_range(pages, name, source, table, message):
    with pytest.raises(ValueError, match=message):
        kernels(name).quantize_gather(pages, table, [source])


@pytest.mark.parametrize("name", ["reference", "numba"])
def test_refuses_pieces_out_of_range_and_writes_nothing(pages, name):
    ours = kernels(name)
    (run,) = ours.quantize_gather(pages, range(6), [Source(0, 40, "k8v4")])
    target = poisoned(pages)
    before = bits(target).clone()
    good = Piece(run, 0, 10, 0)
    short = PackedRun("k8v4", 40, run.data[:-2].clone())
    for bad, message in (
        (Piece(run, 35, 6, 0), "no stretch of a run of 40 tokens"),
        (Piece(run, 0, 0, 0), "no stretch"),
        (Piece(run, 0, 40, 153), "reaches out of a page table of 192"),
        (Piece(run, 0, 4, 0, 256), "beyond the rotary table"),
        (Piece(short, 0, 4, 0), "bytes here"),
        (Piece(PackedRun("k8v4", 40, run.data.view(torch.int8)), 0, 4, 0), "contiguous uint8"),
        (Piece(PackedRun("fp4", 40, run.data), 0, 4, 0), "fp4"),
    ):
        if "rotary" in message and name == "reference":
            continue  # a row at a time: the first piece is written before the second is looked at
        with pytest.raises(ValueError, match=message):
            ours.dequantize_scatter([good, bad], target, range(6))
        assert torch.equal(bits(target), before)


def test_refuses_a_shift_without_a_rotation(pages):
    ours = kernels(rotation=None)
    (run,) = ours.quantize_gather(pages, range(6), [Source(0, 4, "exact")])
    with pytest.raises(ValueError, match="built without a rotation"):
        ours.dequantize_scatter([Piece(run, 0, 4, 0, 1)], pages, range(6))


def test_refuses_pages_of_another_dtype(pages):
    with pytest.raises(ValueError, match="built for"):
        kernels().quantize_gather([p.half() for p in pages], range(6), [Source(0, 4, "exact")])


@pytest.mark.parametrize(
    ("queries", "positions", "tokens", "message"),
    [
        (torch.zeros(2, 3, 64), [0, 1], 4, "a multiple of 2"),
        (torch.zeros(2, 4, 32), [0, 1], 4, "64"),
        (torch.zeros(2, 4, 64), [0], 4, "2 numbers from 0"),
        (torch.zeros(2, 4, 64), [0, -1], 4, "2 numbers from 0"),
        (torch.zeros(2, 4, 64), [0, 1], 193, "tokens=193"),
        (torch.zeros(2, 4, 64), [0, 1], 0, "tokens=0"),
    ],
)
def test_refuses_queries_that_do_not_fit(pages, queries, positions, tokens, message):
    with pytest.raises(ValueError, match=message):
        kernels().attention_mass(queries, torch.tensor(positions), pages[0], range(6), tokens, 1.0)


def test_refuses_a_residual_out_of_range(pages):
    with pytest.raises(ValueError, match="reach out of a page table"):
        kernels().value_residual(pages, range(6), 190, 3)


@pytest.mark.parametrize("tag", COMPARISON)
def test_comparison_formats_move_and_turn(pages, tag):
    ours = kernels("numba")
    sources = [Source(5, 100, tag), Source(5, 100, "exact"), Source(0, 9, Tag.K8V4)]
    run, exact, other = ours.quantize_gather(pages, range(6), sources)
    assert (run.tag, run.tokens, other.tokens) == (tag, 100, 9)
    assert run.data.numel() < 0.55 * exact.data.numel()
    lossy, right = poisoned(pages), poisoned(pages)
    ours.dequantize_scatter([Piece(run, 10, 80, 33, 28)], lossy, range(6))
    ours.dequantize_scatter([Piece(exact, 10, 80, 33, 28)], right, range(6))
    written = ~torch.stack(right).isnan()
    assert torch.equal(written, ~torch.stack(lossy).isnan())
    error = (torch.stack(lossy) - torch.stack(right))[written].float().norm() / torch.stack(right)[
        written
    ].float().norm()
    assert 0 < float(error) < 0.6
