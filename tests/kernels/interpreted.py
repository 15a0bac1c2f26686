"""Runs the Triton kernels by the interpreter against their twins; prints `{case: failure or null}` as JSON.

A process of its own: triton reads TRITON_INTERPRET when it is imported, and interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import json
import traceback
from random import Random

import torch
from cases import INTERPRETED, bits, case_name, make_layout, make_pages, poisoned, ulps

from agentcache.kernels import Kernels, Piece, Source, TableRotation, Tag

LAYERS, HEADS, PAGES = 2, 2, 5


def check(case: tuple) -> None:
    dim, rotary, page, kind, dtype, interleaved = case
    random = Random(case_name(case))
    layout = make_layout(kind, HEADS, page, dim, PAGES)
    rotation = TableRotation.from_theta(rotary, 256, interleaved=interleaved)
    ours, twin = (
        Kernels(layout, layers=LAYERS, dtype=dtype, rotation=rotation, implementation=name)
        for name in ("triton", "reference")
    )
    pages = make_pages(layout, LAYERS, PAGES, dtype, random.randrange(99))
    before = bits(pages).clone()
    table = random.sample(range(PAGES), PAGES)
    capacity = PAGES * page
    allowed = 1 if dtype is torch.bfloat16 else 0  # the interpreter cuts bfloat16 where the hardware rounds it

    for tokens in (1, min(63, capacity), min(111, capacity)):
        start = random.randint(0, capacity - tokens)
        sources = [Source(start, tokens, tag) for tag in Tag]
        runs = twin.quantize_gather(pages, table, sources)
        for mine, right in zip(ours.quantize_gather(pages, table, sources), runs, strict=True):
            assert torch.equal(mine.data, right.data), f"packing {tokens} tokens as {mine.tag}"
        pieces, free = [], random.randint(0, 5)
        for run in runs:
            first = random.randint(0, tokens - 1)
            length = min(random.randint(1, tokens - first), capacity - free)
            if length > 0:
                pieces.append(Piece(run, first, length, free, random.choice([0, 3, -200])))
            free += length + random.randint(0, 3)
        mine, right = poisoned(pages), poisoned(pages)
        ours.dequantize_scatter(pieces, mine, table)
        twin.dequantize_scatter(pieces, right, table)
        assert ulps(mine, right) <= allowed, f"restoring {[p[1:] for p in pieces]}: {ulps(mine, right)} ulps"
        assert torch.equal(bits(mine) == -1, bits(right) == -1), "other cells than the pieces' were touched"
        assert torch.equal(bits(pages), before), "the source pages changed"
        for run, original in zip(runs, twin.quantize_gather(pages, table, sources), strict=True):
            assert torch.equal(run.data, original.data), "the packed bytes changed"

        # Float32 queries on bfloat16 keys: the interpreter has no bfloat16 dot product.
        queries = torch.randn(3, 3 * HEADS, dim, generator=torch.Generator().manual_seed(tokens))
        queries = queries if dtype is torch.bfloat16 else queries.to(dtype)
        positions = torch.tensor([tokens - 1, tokens // 2, 0])
        arguments = (queries, positions, pages[0], table, tokens, 0.3 * dim**-0.5)
        mass = ours.attention_mass(*arguments)
        assert torch.allclose(mass, twin.attention_mass(*arguments), atol=1e-5), "attention mass"
        residual = ours.value_residual(pages, table, start, tokens)
        assert torch.allclose(residual, twin.value_residual(pages, table, start, tokens), rtol=1e-4), "value residual"


def main() -> None:
    """Runs every case."""
    torch.set_num_threads(1)
    results: dict[str, str | None] = {}
    for case in INTERPRETED:
        try:
            check(case)
            results[case_name(case)] = None
        except Exception:  # noqa: BLE001 - the parent process raises it again
            results[case_name(case)] = traceback.format_exc()
    print(json.dumps(results))  # noqa: T201 - the result


if __name__ == "__main__":
    main()
