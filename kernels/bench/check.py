"""Compares an implementation with the float32 twins on its own device: `python -m agentcache.kernels.bench.check --device cuda`."""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence

import torch

from agentcache.kernels import Kernels, Piece, Source, TableRotation, Tag
from agentcache.kernels.bench.material import layout_for

__all__ = ["check", "main"]

_LAYERS, _HEADS, _PAGES = 2, 2, 12
_DIMS, _PAGE_TOKENS = (64, 80, 96, 128, 256), (16, 32)
_INTEGER = {2: torch.int16, 4: torch.int32}


def _ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    ordered = []
    for x in (a, b):
        i = x.view(_INTEGER[x.element_size()]).long()
        ordered.append(torch.where(i < 0, -(1 << (8 * x.element_size() - 1)) - i, i))
    return int((ordered[0] - ordered[1]).abs().max())


def check(
    device: torch.device, implementation: str, dim: int, page: int, isa: str, dtype: torch.dtype, seed: int
) -> None:
    """Raises AssertionError where the implementation and the twins differ by more than one unit of the last place."""
    choice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layout = layout_for(isa, _HEADS, page, dim, _PAGES)
    rotation = TableRotation.from_theta(choice.choice([dim, dim // 2]), 512, interleaved=choice.random() < 0.5)
    ours, twin = (
        Kernels(layout, layers=_LAYERS, dtype=dtype, rotation=rotation, device=device, implementation=name)
        for name in (implementation, "reference")
    )
    size = (_PAGES - 1) * layout.page_stride + layout.extent
    pages = [(torch.randn(size, generator=generator) * 5).to(dtype).to(device) for _ in range(_LAYERS)]
    table = torch.randperm(_PAGES, generator=generator)
    capacity = _PAGES * page
    tokens = choice.randint(1, capacity)
    start = choice.randint(0, capacity - tokens)
    sources = [Source(start, tokens, tag) for tag in Tag]
    runs = twin.quantize_gather(pages, table, sources)
    for mine, right in zip(ours.quantize_gather(pages, table, sources), runs, strict=True):
        different = int((mine.data != right.data).sum())
        # A scale or code may round the other way where the hardware divides differently; an exact run may not.
        assert different <= (0 if mine.tag == Tag.EXACT else mine.data.numel() // 1000), (
            f"{mine.tag}: {different} bytes differ"
        )
    for run, shift in itertools.product(runs, (0, choice.randint(-500, 500) or 1)):
        first = choice.randint(0, tokens - 1)
        length = choice.randint(1, tokens - first)
        piece = Piece(run, first, length, choice.randint(0, capacity - length), shift)
        targets = []
        for kernels in (ours, twin):
            target = [torch.full_like(p.view(torch.uint8), 0xFF).view(dtype) for p in pages]
            kernels.dequantize_scatter([piece], target, table)
            targets.append(torch.stack(target))
        assert torch.equal(targets[0].isnan(), targets[1].isnan()), f"{piece[1:]}: other cells were touched"
        assert _ulps(*targets) <= 1, f"{run.tag} {piece[1:]}: {_ulps(*targets)} units of the last place"
    queries = torch.randn(5, 3 * _HEADS, dim, generator=generator).to(dtype).to(device)
    positions = torch.tensor([0, tokens // 3, tokens // 2, tokens - 1, tokens - 1])
    masses = [k.attention_mass(queries, positions, pages[0], table, tokens, 0.1 * dim**-0.5) for k in (ours, twin)]
    assert torch.allclose(*masses, atol=1e-4), f"attention mass off by {float((masses[0] - masses[1]).abs().max()):.1e}"
    residuals = [k.value_residual(pages, table, start, tokens) for k in (ours, twin)]
    assert torch.allclose(*residuals, rtol=1e-3), "value residual"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when every case agrees."""
    parser = argparse.ArgumentParser(prog="python -m agentcache.kernels.bench.check", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--implementation", default="auto")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    layouts = ("vec", "amx", "flash_attn")
    cases = list(itertools.product(_DIMS, _PAGE_TOKENS, layouts, (torch.bfloat16, torch.float16)))
    for seed, case in enumerate(cases):
        check(device, options.implementation, *case, seed)
    print(f"{len(cases)} settings agree with the reference on {device}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
