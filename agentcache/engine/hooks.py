"""Looks at q, k and v of attention layers during a segment forward; ends it early when nobody asks for the remaining layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from agentcache.engine.segments import Segment, SegmentForward
from agentcache.errors import SelfCheckError

__all__ = ["Seen", "Sight", "forward_until", "run_order", "watch"]


class Seen(NamedTuple):
    """What a layer attends with, rotated, in the order of the forward's rows: q `[T, Hq, D]`, k and v `[T, H, D]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


Sight = Callable[[int, Seen], None]
"""Gets the index of a watched layer and what it sees, before K/V are written."""


class _EnoughError(Exception):
    """Ends a forward whose remaining layers nobody asks for."""


@contextlib.contextmanager
def watch(layers: Sequence[Any], see: Sight) -> Iterator[None]:
    """Calls `see` with what each layer is about to attend with.

    Args:
        layers: vLLM's attention modules.
        see: Gets the layer's index in `layers`.
    """

    def hook(index: int) -> Any:
        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :])]
            heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
            see(index, Seen(*(x.reshape(-1, n, module.head_size) for x, n in zip(given[:3], heads, strict=True))))

        return look

    handles = [
        layer.register_forward_pre_hook(hook(at), with_kwargs=True, prepend=True) for at, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def forward_until(
    forward: SegmentForward, batch: Sequence[Segment], layers: Sequence[Any], see: Sight, *, write: bool = True
) -> None:
    """Runs one batch through the model up to the last of `layers`, whose K/V are not written any more.

    Args:
        forward: The engine's segment forward.
        batch: Runs within the engine's limits.
        layers: vLLM's attention modules, in the order in which the model runs them.
        see: See `watch`.
        write: Whether K/V of the layers before are written, see `SegmentForward.forward`.

    Raises:
        SelfCheckError: The model ended without its last layer.
    """

    def look(index: int, seen: Seen) -> None:
        see(index, seen)
        if index == len(layers) - 1:
            raise _EnoughError

    try:
        with watch(layers, look):
            forward.forward(batch, write=write)
    except _EnoughError:
        return
    raise SelfCheckError(f"the model's forward ended without its layer {len(layers)} that was asked for")


def run_order(batch: Sequence[Segment]) -> list[int]:
    """Returns the indices of a batch's segments in the order in which the model sees their rows."""
    return sorted(range(len(batch)), key=lambda at: len(batch[at]))
