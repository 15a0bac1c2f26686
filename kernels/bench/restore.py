"""What a restore costs beside a plain copy of the bytes that it writes, each tag in turn, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from agentcache.kernels import Piece, Source, Tag
from agentcache.kernels.bench.material import Material, attention_isa, synthetic_kv
from agentcache.kernels.bench.measure import Setup, elapsed_ms, quantiles

__all__ = ["restore_times"]

_SHIFT = 5  # positions, and tokens off the block's edge, of the shifted arm
_WARM_UP = 2


def restore_times(
    *,
    tokens: int = 4096,
    layers: int = 30,
    kv_heads: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    block: int | None = None,
    tags: Sequence[str] = ("exact", "k8v8", "k8v4"),
    mix: Sequence[tuple[str, int]] | None = None,
    material: Material | None = None,
    implementation: str = "auto",
    repeats: int = 15,
) -> dict[str, Any]:
    """Returns how long restoring a checkpoint takes, and a torch copy of the same destination bytes with the same threads.

    Two arms a tag: `aligned0` (whole pages, keys as they are) and `shifted` (5 tokens off the pages' edges, keys turned by 5
    positions). Every round runs every arm once, and the copy before each, so that what disturbs the machine disturbs all. The
    defaults are 4k tokens of SmolLM2-135M. Needs torch and an implementation, nothing else.

    Args:
        tokens: N; with `material`, as many as that holds.
        layers: L, without `material`.
        kv_heads: H, without `material`.
        head_dim: D, without `material`.
        dtype: The KV dtype, without `material`.
        device: Where the pages are.
        block: Tokens a page; None takes 32 on CPU, 16 on GPU.
        tags: Checkpoints of one tag each.
        mix: Consecutive runs `(tag, tokens)` of one more checkpoint, named `mixed`; repeated until all tokens have a tag.
        material: KV to restore, as of `real_kv`; None makes some up.
        implementation: As of `Kernels`.
        repeats: Rounds that count, at least 9.

    Returns:
        `restore_ms` `{tag: {"aligned0" | "shifted": {"p20", "p50", "p80"}}}`, `copy_ms` `{"p20", "p50", "p80"}`, `share` (copy
        time over restore time at the median, in the shape of `restore_ms`), `size_bytes` (what each arm writes), `isa`,
        `threads`, `device`, `implementation`, `material`, and the shape `tokens`, `layers`, `kv_heads`, `head_dim`.

    Raises:
        ValueError: Fewer than 9 repeats, an unknown tag, or a mix without tokens.
    """
    if repeats < 9:
        raise ValueError(f"repeats={repeats}: medians need at least 9")
    if mix is not None and (not mix or min(count for _, count in mix) < 1):
        raise ValueError(f"mix={mix!r}: name a tag and at least one token for every run")
    device = torch.device(device)
    material = material or synthetic_kv(layers, kv_heads, tokens, head_dim, dtype)
    layers, kv_heads, tokens, head_dim = material.k.shape
    block = block or (32 if device.type == "cpu" else 16)
    setup = Setup.build(material, device, block, implementation)
    sources = {tag: [Source(0, tokens, Tag(tag))] for tag in tags}
    if mix is not None:
        sources["mixed"] = _mixed(mix, tokens)
    arms = {
        (tag, name): _arm(setup, of_tag, offset)
        for tag, of_tag in sources.items()
        for name, offset in (("aligned0", 0), ("shifted", _SHIFT))
    }
    size = 2 * material.k.numel() * material.k.element_size()
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copy_ms: list[float] = []
    arm_ms: dict[tuple[str, str], list[float]] = {key: [] for key in arms}
    for round_ in range(_WARM_UP + repeats):
        for key, arm in arms.items():
            for samples, call in ((copy_ms, lambda: target.copy_(source)), (arm_ms[key], arm)):
                elapsed = elapsed_ms(call, device)
                if round_ >= _WARM_UP:
                    samples.append(elapsed)
    copy = quantiles(copy_ms)
    times = {tag: {name: quantiles(arm_ms[tag, name]) for name in ("aligned0", "shifted")} for tag in sources}
    return {
        "restore_ms": times,
        "copy_ms": copy,
        "share": {tag: {name: copy["p50"] / ms["p50"] for name, ms in both.items()} for tag, both in times.items()},
        "size_bytes": size,
        "isa": attention_isa(device, material.k.dtype),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "implementation": setup.kernels.implementation,
        "material": material.name,
        "tokens": tokens,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }


def _mixed(mix: Sequence[tuple[str, int]], tokens: int) -> list[Source]:
    sources: list[Source] = []
    at = 0
    while at < tokens:
        tag, count = mix[len(sources) % len(mix)]
        sources.append(Source(at, min(count, tokens - at), Tag(tag)))
        at += count
    return sources


def _arm(setup: Setup, sources: Sequence[Source], offset: int) -> Callable[[], None]:
    """Returns a restore of the packed sources, `offset` tokens and positions from where they were."""
    runs = setup.kernels.quantize_gather(setup.pages, setup.table, sources)
    pieces = [
        Piece(run, 0, run.tokens, start + offset, offset) for run, (start, _, _) in zip(runs, sources, strict=True)
    ]
    return lambda: setup.kernels.dequantize_scatter(pieces, setup.targets, setup.table)
