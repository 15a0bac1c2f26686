"""Page layouts, pages and pieces that the kernel tests share. Needs only torch and the kernels."""

from __future__ import annotations

import torch

from agentcache.kernels import PackedRun, PageLayout, Strides

POISON = 0xFF  # the bytes of a NaN in every KV dtype
LAYOUTS = ("cpu", "rows", "split", "amx")
INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


# head dim, rotary dim, page, layout, dtype, interleaved
INTERPRETED = [
    (64, 64, 32, "cpu", torch.float16, False),
    (64, 64, 16, "rows", torch.bfloat16, True),
    (80, 80, 16, "rows", torch.float16, False),
    (96, 48, 32, "split", torch.float32, True),
    (128, 128, 32, "rows", torch.bfloat16, False),
    (128, 64, 32, "amx", torch.float16, True),
    (192, 192, 16, "split", torch.float16, False),
    (256, 256, 16, "rows", torch.float32, False),
    (32, 32, 64, "amx", torch.bfloat16, False),
]


def case_name(case: tuple) -> str:
    """Returns a case's test id."""
    dim, rotary, page, layout, dtype, interleaved = case
    return f"D{dim}-R{rotary}-B{page}-{layout}-{str(dtype)[6:]}-{'pairs' if interleaved else 'halves'}"


def make_layout(kind: str, heads: int, block: int, dim: int, num_pages: int) -> PageLayout:
    """Returns a page layout of a real backend.

    cpu: K transposed, V plain, as vLLM's CPU attention; rows: K and V rows of all heads a page (FlashAttention); split: all
    K pages before all V pages; amx: K in pairs of dimensions and V in pairs of tokens, which no strides describe.
    """
    shape, half = (heads, block, dim), heads * block * dim
    if kind == "cpu":
        k, v = Strides(0, 2 * block * dim, 1, block), Strides(block * dim, 2 * block * dim, dim, 1)
        return PageLayout.from_strides(shape, 2 * half, k, v)
    if kind == "rows":
        strides = (dim, heads * dim, 1)
        return PageLayout.from_strides(shape, 2 * half, Strides(0, *strides), Strides(half, *strides))
    if kind == "split":
        strides = (dim, heads * dim, 1)
        return PageLayout.from_strides(shape, half, Strides(0, *strides), Strides(num_pages * half, *strides))
    h, t, d = (x.view(s) for x, s in zip(map(torch.arange, shape), ((-1, 1, 1), (1, -1, 1), (1, 1, -1)), strict=True))
    k = h * 2 * block * dim + (t // 16) * 16 * dim + d // 2 * 32 + t % 16 * 2 + d % 2
    v = h * 2 * block * dim + block * dim + t // 2 * 2 * dim + d * 2 + t % 2
    return PageLayout.from_cells(2 * half, k, v)


def make_pages(layout: PageLayout, layers: int, num_pages: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Returns pages of random KV whose channels differ in size, as those of real keys do."""
    heads, block, dim = layout.shape
    generator = torch.Generator().manual_seed(seed)
    size = num_pages * 2 * heads * block * dim
    scale = torch.rand(4096, generator=generator) * 8
    return [
        (torch.randn(size, generator=generator) * scale.repeat(-(-size // 4096))[:size]).to(dtype)
        for _ in range(layers)
    ]


def poisoned(pages: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns pages of the same shape, every cell NaN."""
    return [torch.full_like(p.view(torch.uint8), POISON).view(p.dtype) for p in pages]


def bits(pages: list[torch.Tensor]) -> torch.Tensor:
    """Returns the pages' elements as integers, so that NaN compares."""
    return torch.stack([p.view(INTEGER[p.dtype]) for p in pages])


def ulps(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    """Returns the largest distance of two sets of pages in units of the last place; poison must match poison."""
    ordered = []
    for pages in (a, b):
        i = bits(pages).long()
        sign = -(1 << (8 * pages[0].element_size() - 1))
        ordered.append(torch.where(i < 0, sign - i, i))
    return int((ordered[0] - ordered[1]).abs().max())


def run_of(tag: str, tokens: int, data: torch.Tensor) -> PackedRun:
    """Returns a packed run of a copy of some bytes."""
    return PackedRun(tag, tokens, data.clone())
