"""Page layouts are learned from any writer: plain, transposed, packed, split along another axis."""

from types import SimpleNamespace

import pytest
import torch

from agentcache.engine.pages import Pages, probe_layout
from agentcache.errors import SelfCheckError

H, B, D, N = 3, 8, 16, 6


class Writer:
    """A backend that keeps element (token, head, dim) of K and V at the cell that `k_cell` and `v_cell` name."""

    def __init__(self, k_cell, v_cell, axis=0):
        self.k_cell, self.v_cell, self.axis = k_cell, v_cell, axis

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        for i, slot in enumerate(slots.tolist()):
            page = cache.select(self.axis, slot // B)
            flat = page.view(-1) if page.is_contiguous() else page
            for h in range(H):
                for d in range(D):
                    for rows, cell in ((key, self.k_cell), (value, self.v_cell)):
                        if flat is page:
                            page[cell(slot % B, h, d)] = rows[i, h, d]
                        else:
                            flat[cell(slot % B, h, d)] = rows[i, h, d]


def _k_transposed(t, h, d):
    return h * 2 * B * D + d * B + t


def _v_plain(t, h, d):
    return h * 2 * B * D + B * D + t * D + d


def _k_packed(t, h, d):  # pairs of dims interleaved per token, as AMX tiles want them
    return h * 2 * B * D + (d // 2) * 2 * B + t * 2 + d % 2


def _split_k(t, h, d):
    return (0, t, h, d)


def _split_v(t, h, d):
    return (1, t, h, d)


LAYOUTS = {
    "transposed": (Writer(_k_transposed, _v_plain), (N, H, B, 2 * D), 0, True),
    "packed": (Writer(_k_packed, _v_plain), (N, H, B, 2 * D), 0, False),
    "kv-axis-first": (Writer(_split_k, _split_v, axis=1), (2, N, B, H, D), 1, True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_written_by_the_backend_are_read_back(name, dtype):
    impl, shape, axis, strided = LAYOUTS[name]
    layer = SimpleNamespace(impl=impl)
    cache = torch.zeros(shape, dtype=dtype)
    layout = probe_layout(layer, cache, num_blocks=N, block_size=B, num_kv_heads=H, head_dim=D)
    assert (layout.k_strides is not None) == strided
    assert cache.abs().sum() == 0, "the null block is left clean"
    pages = Pages(layer, cache, layout, N)
    table = torch.tensor([4, 1, 3])
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(13, H, D, generator=generator).to(dtype) for _ in range(2))
    at = torch.arange(5, 18)
    pages.write(table[at // B] * B + at % B, key, value)
    before = cache.clone()
    got_key, got_value = pages.read(table, 5, 18)
    assert torch.equal(got_key, key)
    assert torch.equal(got_value, value)
    assert torch.equal(cache, before), "reading changes nothing"
    got_key += 1
    assert torch.equal(cache, before), "rows that were read are copies"
    assert cache.select(axis, 2).abs().sum() == 0, "other pages are untouched"


def test_a_lossy_layout_is_refused():
    class Drops(Writer):
        def do_kv_cache_update(self, layer, key, value, cache, slots):
            super().do_kv_cache_update(layer, key[:, :, : D // 2].repeat(1, 1, 2), value, cache, slots)

    layer = SimpleNamespace(impl=Drops(_k_transposed, _v_plain))
    with pytest.raises(SelfCheckError, match="not a permutation"):
        probe_layout(layer, torch.zeros(N, H, B, 2 * D), num_blocks=N, block_size=B, num_kv_heads=H, head_dim=D)


def test_a_cache_without_that_many_blocks_is_refused():
    layer = SimpleNamespace(impl=Writer(_k_transposed, _v_plain))
    with pytest.raises(SelfCheckError, match="blocks"):
        probe_layout(layer, torch.zeros(N, H, B, 2 * D), num_blocks=99, block_size=B, num_kv_heads=H, head_dim=D)
