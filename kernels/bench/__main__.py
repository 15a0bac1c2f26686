"""The command: builds the material, measures, prints a table, writes JSON."""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentcache.kernels import IMPLEMENTATIONS
from agentcache.kernels.bench.material import real_kv, synthetic_kv
from agentcache.kernels.bench.measure import Setup, hardware, measure, quality, versions

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agentcache.kernels.bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--implementation", default="auto", choices=IMPLEMENTATIONS)
    parser.add_argument("--model", type=Path, help="model folder whose own KV is measured (needs transformers)")
    parser.add_argument("--text", type=Path, help="text for --model; default: the source of these kernels")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=30, help="without --model; the defaults are SmolLM2-135M's")
    parser.add_argument("--kv-heads", type=int, default=3, help="without --model")
    parser.add_argument("--head-dim", type=int, default=64, help="without --model")
    parser.add_argument("--block", type=int, help="tokens a page; default: 32 on CPU, 16 on GPU")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=15, help="at least 7")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of one measurement."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.repeats < 7:
        parser.error(f"--repeats {options.repeats}: medians need at least 7")
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    if options.model is not None:
        material = real_kv(options.model, options.tokens, dtype, options.text)
    else:
        material = synthetic_kv(options.layers, options.kv_heads, options.tokens, options.head_dim, dtype)
    block = options.block or (32 if device.type == "cpu" else 16)
    setup = Setup.build(material, device, block, options.implementation)
    result: dict[str, Any] = {
        "rows": measure(setup, options.repeats),
        "material": material.name,
        "dtype": options.dtype,
        "block_size": block,
        "implementation": setup.kernels.implementation,
        "tags": quality(setup),
        "versions": versions(),
        "hardware": hardware(device, dtype),
    }
    _show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _show(result: dict[str, Any]) -> None:
    machine = result["hardware"]
    print(
        f"{result['implementation']} on {machine.get('gpu', machine['processor'])}, {machine['threads']} threads, "
        f"attention {machine['attention_isa']}; {result['material']}"
    )
    for tag, numbers in result["tags"].items():
        print(
            f"  {tag:6} {numbers['payload_ratio']:.4f} of the bytes, error K {numbers['k_error']:.4f} V {numbers['v_error']:.4f}"
        )
    print(f"{'op':20}{'tag':7}{'shift':>6}{'aligned':>9}{'p50 ms':>9}{'GB/s':>8}{'copy':>8}{'share':>7}")
    for row in result["rows"]:
        print(
            f"{row['op']:20}{row['tag']:7}{row['shift']:>6}{'yes' if row['aligned'] else 'no':>9}{row['ms']['p50']:>9.2f}"
            f"{row['gb_s']:>8.1f}{row['copy_gb_s']:>8.1f}{row['share']:>7.2f}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
