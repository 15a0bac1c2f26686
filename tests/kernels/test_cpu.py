"""The CPU loops against their twins: bit for bit, on random page tables, lengths, offsets and shifts."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from agentcache.kernels import Kernels, Piece, Source, TableRotation, Tag, cpu_simd_rows
from agentcache.kernels.cpu_simd_rows import dot_lines8
from tests.kernels.cases import LAYOUTS, bits, make_layout, make_pages, poisoned

LAYERS, HEADS, PAGES = 2, 3, 9
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
built: dict[tuple[object, ...], tuple[Kernels, Kernels]] = {}


def pair(kind, block, dim, dtype, rotary_dim, interleaved):
    """Returns the kernels under test and their twins."""
    key = (kind, block, dim, dtype, rotary_dim, interleaved)
    if key not in built:
        layout = make_layout(kind, HEADS, block, dim, PAGES)
        rotation = TableRotation.from_theta(rotary_dim, 1024, interleaved=interleaved)
        both = (
            Kernels(layout, layers=LAYERS, dtype=dtype, rotation=rotation, implementation=name)
            for name in ("numba", "reference")
        )
        built[key] = tuple(both)
    return built[key]


@st.composite
def settings_of(draw):
    dim = draw(st.sampled_from([32, 64, 80, 96, 128, 256]))
    return (
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from([16, 32, 64])),
        dim,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([dim, dim // 2])),
        draw(st.booleans()),
    )


@st.composite
def stretches(draw, capacity):
    length = draw(st.integers(1, capacity))
    return draw(st.integers(0, capacity - length)), length


def table_of(draw):
    return torch.tensor(draw(st.permutations(range(PAGES))))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_packing_gives_the_twins_bytes_and_leaves_the_pages(data):
    setting = data.draw(settings_of())
    numba, twin = pair(*setting)
    table, capacity = table_of(data.draw), PAGES * setting[1]
    pages = make_pages(numba.setting.layout, LAYERS, PAGES, setting[3], data.draw(st.integers(0, 99)))
    before = bits(pages).clone()
    sources = [Source(*data.draw(stretches(capacity)), data.draw(st.sampled_from(Tag))) for _ in range(2)]
    for ours, theirs in zip(
        numba.quantize_gather(pages, table, sources), twin.quantize_gather(pages, table, sources), strict=True
    ):
        assert torch.equal(ours.data, theirs.data)
    assert torch.equal(bits(pages), before)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_restoring_gives_the_twins_cells_and_no_others(data):
    setting = data.draw(settings_of())
    numba, twin = pair(*setting)
    table, capacity = table_of(data.draw), PAGES * setting[1]
    source_pages = make_pages(numba.setting.layout, LAYERS, PAGES, setting[3], data.draw(st.integers(0, 99)))
    sources = [Source(*data.draw(stretches(capacity)), data.draw(st.sampled_from(Tag))) for _ in range(2)]
    runs = twin.quantize_gather(source_pages, table, sources)
    packed = [run.data.clone() for run in runs]

    pieces, free = [], 0
    for run in runs:
        start = data.draw(st.integers(0, run.tokens - 1))
        dst = free + data.draw(st.integers(0, 70))
        if dst >= capacity:
            break
        length = data.draw(st.integers(1, min(run.tokens - start, capacity - dst)))
        pieces.append(Piece(run, start, length, dst, data.draw(st.sampled_from([0, 0, 1, -1, 7, -300, 1023]))))
        free = dst + length
    ours, theirs = poisoned(source_pages), poisoned(source_pages)
    numba.dequantize_scatter(pieces, ours, table)
    twin.dequantize_scatter(pieces, theirs, table)
    assert torch.equal(bits(ours), bits(theirs))
    # Twin and kernel could agree on writing too much: count the touched cells.
    touched = int((bits(ours) != bits(poisoned(source_pages))).sum())
    assert touched <= sum(piece.length for piece in pieces) * LAYERS * HEADS * setting[2] * 2
    for run, data_before in zip(runs, packed, strict=True):
        assert torch.equal(run.data, data_before)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("start", "dst"), [(0, 0), (0, 5), (37, 64), (33, 31), (64, 160)])
def test_exact_runs_move_bit_for_bit(kind, start, dst):
    numba, _ = pair(kind, 32, 64, torch.bfloat16, 64, False)
    table = torch.randperm(PAGES)
    pages = make_pages(numba.setting.layout, LAYERS, PAGES, torch.bfloat16, 3)
    pages[0].view(torch.int16)[::97] = 0x7FC1  # NaN with a payload
    (run,) = numba.quantize_gather(pages, table, [Source(10, 140, "exact")])
    moved = poisoned(pages)
    numba.dequantize_scatter([Piece(run, start, 140 - start, dst)], moved, table)
    (back,) = numba.quantize_gather(moved, table, [Source(dst, 140 - start, "exact")])
    (expected,) = numba.quantize_gather(pages, table, [Source(10 + start, 140 - start, "exact")])
    assert torch.equal(back.data, expected.data)


def test_pages_that_start_between_cache_lines():
    numba, twin = pair("cpu", 32, 64, torch.bfloat16, 64, False)
    pages = make_pages(numba.setting.layout, LAYERS, PAGES, torch.bfloat16, 4)
    (run,) = twin.quantize_gather(pages, range(PAGES), [Source(0, 200, "k8v4")])
    results = []
    for kernels in (numba, twin):
        shifted = [torch.zeros(len(page) + 8, dtype=page.dtype)[3 : 3 + len(page)] for page in pages]
        assert all(page.data_ptr() % 64 for page in shifted)
        kernels.dequantize_scatter([Piece(run, 0, 200, 7, -5)], shifted, range(PAGES))
        results.append(bits(shifted))
    assert torch.equal(*results)


def test_a_long_run_is_shared_by_threads():
    layout = make_layout("cpu", 1, 32, 32, 160)
    numba, twin = (Kernels(layout, layers=1, dtype=torch.bfloat16, implementation=n) for n in ("numba", "reference"))
    pages = make_pages(layout, 1, 160, torch.bfloat16, 5)
    ours, theirs = (k.quantize_gather(pages, range(160), [Source(3, 5000, "k8v4")])[0] for k in (numba, twin))
    assert torch.equal(ours.data, theirs.data)
    restored, expected = poisoned(pages), poisoned(pages)
    numba.dequantize_scatter([Piece(ours, 1, 4990, 40)], restored, range(160))
    twin.dequantize_scatter([Piece(ours, 1, 4990, 40)], expected, range(160))
    assert torch.equal(bits(restored), bits(expected))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_attention_mass_is_the_twins(data):
    setting = data.draw(settings_of())
    numba, twin = pair(*setting)
    table, capacity = table_of(data.draw), PAGES * setting[1]
    (page, _) = make_pages(numba.setting.layout, LAYERS, PAGES, setting[3], data.draw(st.integers(0, 99)))
    tokens, count = data.draw(st.integers(1, capacity)), data.draw(st.integers(1, 9))
    positions = torch.tensor(data.draw(st.lists(st.integers(0, capacity), min_size=count, max_size=count)))
    queries = torch.randn(count, 2 * HEADS, setting[2], generator=torch.Generator().manual_seed(tokens))
    arguments = (queries, positions, page, table, tokens, 0.3 * setting[2] ** -0.5)
    ours, theirs = numba.attention_mass(*arguments), twin.attention_mass(*arguments)
    assert torch.allclose(ours, theirs, atol=2e-6)
    assert float(ours.sum()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_many_query_rows_are_shared_by_threads(kind):
    numba, twin = pair(kind, 32, 64, torch.bfloat16, 64, False)
    (page, _) = make_pages(numba.setting.layout, LAYERS, PAGES, torch.bfloat16, 8)
    table, tokens = torch.randperm(PAGES), PAGES * 32 - 5
    positions = torch.randint(0, tokens, (43,))
    arguments = (torch.randn(43, 3 * HEADS, 64), positions, page, table, tokens, 0.05)
    assert torch.allclose(numba.attention_mass(*arguments), twin.attention_mass(*arguments), atol=2e-6)


@pytest.mark.parametrize("lanes", [8, 32])
def test_dot_products_of_any_vector_length(monkeypatch, lanes):
    monkeypatch.setattr(cpu_simd_rows, "_DOT_LANES", lanes)

    @njit
    def dots(queries, keys, out, like):
        dot_lines8(queries.ctypes.data, 48, keys.ctypes.data, 4 * 40, out.ctypes.data, 4 * 35, like)

    queries, keys = (
        np.random.default_rng(n).standard_normal((n, m)).astype(np.float32) for n, m in ((8, 48), (48, 40))
    )
    out = np.full((8, 35), np.nan, np.float32)
    dots(queries, keys, out, np.empty(0, np.float32))
    assert np.allclose(out[:, :32], queries @ keys[:, :32], atol=1e-5)
    assert np.isnan(out[:, 32:]).all()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_value_residual_is_the_twins(data):
    setting = data.draw(settings_of())
    numba, twin = pair(*setting)
    table = table_of(data.draw)
    pages = make_pages(numba.setting.layout, LAYERS, PAGES, setting[3], data.draw(st.integers(0, 99)))
    start, length = data.draw(stretches(PAGES * setting[1]))
    ours = numba.value_residual(pages, table, start, length)
    assert torch.allclose(ours, twin.value_residual(pages, table, start, length), rtol=1e-4)


def test_keys_the_twin_never_sees_do_not_reach_attention():
    numba, twin = pair("cpu", 32, 64, torch.bfloat16, 64, False)
    (page, _) = make_pages(numba.setting.layout, LAYERS, PAGES, torch.bfloat16, 6)
    clean = page.clone()
    (run,) = twin.quantize_gather([page, page], range(PAGES), [Source(0, 70, "exact")])
    dirty = poisoned([page])[0]
    twin.dequantize_scatter([Piece(run, 0, 70, 0)], [dirty, dirty.clone()], range(PAGES))
    queries = torch.randn(2, HEADS, 64)
    results = [numba.attention_mass(queries, torch.tensor([69, 40]), p, range(PAGES), 70, 0.1) for p in (clean, dirty)]
    assert torch.equal(*results)


def test_several_threads_may_call_at_once():
    numba, twin = pair("cpu", 32, 64, torch.bfloat16, 64, False)
    pages = make_pages(numba.setting.layout, LAYERS, PAGES, torch.bfloat16, 7)
    cases = list(itertools.product(Tag, range(4)))
    expected = [twin.quantize_gather(pages, range(PAGES), [Source(n, 150, tag)])[0].data for tag, n in cases]
    with ThreadPoolExecutor(4) as threads:
        runs = threads.map(
            lambda case: numba.quantize_gather(pages, range(PAGES), [Source(case[1], 150, case[0])]), cases * 5
        )
        for run, data in zip(runs, expected * 5, strict=True):
            assert torch.equal(run[0].data, data)
