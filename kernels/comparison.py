"""Other people's KV formats, for whole-checkpoint comparisons: plain torch, on any device, not fast.

Every pack is a fixed list of arrays, one after the other; `N4` is the number of tokens in whole groups of 32.

| name | keys | values | bits at D = 64 |
|---|---|---|---|
| `int8` | 8 bits a token, symmetric | the same | 8.25 |
| `int4` | 4 bits a token, asymmetric | the same | 4.5 |
| `fp8_e4m3` | e4m3 a token, scaled to 448 | the same | 8.25 |
| `kivi4`, `kivi2` | 4 or 2 bits a channel over 32 tokens, asymmetric | a token over 32 dimensions, asymmetric | 5, 3 |
| `ott` | `kivi2`, but one outlier token of each group stays exact | the same | 3.44 |

KIVI (Liu et al., 2024) keeps the newest tokens that do not fill a group exact; so do `kivi*` and `ott` here. OTT (Su et al.,
2025) traces tokens whose keys are far smaller than their neighbours' and leaves them out of the groups they would spoil.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["COMPARISON", "ComparisonFormat"]

_GROUP = 32
_FP8_MAX = 448.0

Rows = tuple[torch.Tensor, torch.Tensor]


class _Reader:
    """Reads arrays off packed bytes, in order."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._at = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the next array."""
        count = 1
        for n in shape:
            count *= n
        size = count * torch.empty((), dtype=dtype).element_size()
        raw = self._data[self._at : self._at + size].clone()
        self._at += size
        return raw.view(dtype).view(shape)


def _bytes(*arrays: torch.Tensor) -> torch.Tensor:
    return torch.cat([a.contiguous().flatten().view(torch.uint8) for a in arrays])


def _pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns uint8 codes packed 8 / bits a byte, along the last dimension."""
    per = 8 // bits
    parts = codes.unflatten(-1, (-1, per)).int()
    shift = torch.arange(per, device=codes.device, dtype=torch.int32) * bits
    return (parts << shift).sum(-1).to(torch.uint8)


def _unpack_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    per = 8 // bits
    shift = torch.arange(per, device=packed.device, dtype=torch.int32) * bits
    return ((packed.int()[..., None] >> shift) & ((1 << bits) - 1)).flatten(-2).to(torch.uint8)


def _asymmetric(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (codes, scale, low) along the last dimension, scale and low bfloat16."""
    low = x.amin(-1, keepdim=True).bfloat16()
    scale = ((x.amax(-1, keepdim=True) - low.float()) / ((1 << bits) - 1)).clamp_min(1e-20).bfloat16()
    codes = ((x - low.float()) / scale.float()).round().clamp(0, (1 << bits) - 1)
    return codes.to(torch.uint8), scale, low


@dataclass(frozen=True)
class ComparisonFormat:
    """A whole-checkpoint format.

    Attributes:
        name: As in the table above.
        pack: Returns the bytes of K and V rows `[L, H, N, D]`.
        unpack: Returns float32 rows from bytes, the shape `[L, H, N, D]` and the KV dtype.
    """

    name: str
    pack: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor, tuple[int, int, int, int], torch.dtype], Rows]


def _int8(x: torch.Tensor) -> torch.Tensor:
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-20).bfloat16()
    return _bytes(scale, (x.float() / scale.float()).round().clamp(-127, 127).to(torch.int8))


def _from_int8(reader: _Reader, shape: tuple[int, int, int, int]) -> torch.Tensor:
    scale = reader.take((*shape[:3], 1), torch.bfloat16).float()
    return reader.take(shape, torch.int8).float() * scale


def _fp8(x: torch.Tensor) -> torch.Tensor:
    scale = (x.float().abs().amax(-1, keepdim=True) / _FP8_MAX).clamp_min(1e-20).bfloat16()
    return _bytes(scale, (x.float() / scale.float()).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn))


def _from_fp8(reader: _Reader, shape: tuple[int, int, int, int]) -> torch.Tensor:
    scale = reader.take((*shape[:3], 1), torch.bfloat16).float()
    return reader.take(shape, torch.float8_e4m3fn).float() * scale


def _int4(x: torch.Tensor) -> torch.Tensor:
    codes, scale, low = _asymmetric(x.float(), 4)
    return _bytes(scale, low, _pack_bits(codes, 4))


def _from_int4(reader: _Reader, shape: tuple[int, int, int, int]) -> torch.Tensor:
    scale, low = (reader.take((*shape[:3], 1), torch.bfloat16).float() for _ in range(2))
    packed = reader.take((*shape[:3], shape[3] // 2), torch.uint8)
    return _unpack_bits(packed, 4).float() * scale + low


def _twice(
    name: str, pack: Callable[[torch.Tensor], torch.Tensor], unpack: Callable[..., torch.Tensor]
) -> ComparisonFormat:
    """Returns a format that treats K and V alike."""

    def both(data: torch.Tensor, shape: tuple[int, int, int, int], _: torch.dtype) -> Rows:
        reader = _Reader(data)
        return unpack(reader, shape), unpack(reader, shape)

    return ComparisonFormat(name, lambda k, v: torch.cat((pack(k), pack(v))), both)


def _grouped(x: torch.Tensor, bits: int) -> torch.Tensor:
    codes, scale, low = _asymmetric(x.float(), bits)
    return _bytes(scale, low, _pack_bits(codes, bits))


def _from_grouped(reader: _Reader, shape: tuple[int, ...], bits: int) -> torch.Tensor:
    scale, low = (reader.take((*shape[:-1], 1), torch.bfloat16).float() for _ in range(2))
    packed = reader.take((*shape[:-1], shape[-1] * bits // 8), torch.uint8)
    return _unpack_bits(packed, bits).float() * scale + low


def _kivi(name: str, bits: int, *, outliers: bool = False) -> ComparisonFormat:
    def pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        whole = k.shape[2] // _GROUP * _GROUP
        parts = []
        kg, vg = (x[:, :, :whole].unflatten(2, (-1, _GROUP)) for x in (k, v))  # [L, H, groups, 32, D]
        if outliers:
            at = kg.float().abs().sum(-1).argmin(-1)  # [L, H, groups]
            index = at[..., None, None].expand(*at.shape, 1, k.shape[3])
            parts += [at.to(torch.uint8), *(x.gather(3, index) for x in (kg, vg))]
            # The group's mean stands in, so that the outlier stretches no range.
            rest = [(x.float().sum(3, keepdim=True) - x.float().gather(3, index)) / (_GROUP - 1) for x in (kg, vg)]
            kg, vg = (x.float().scatter(3, index, mean) for x, mean in zip((kg, vg), rest, strict=True))
        parts += [_grouped(kg.transpose(3, 4), bits), _grouped(vg.unflatten(-1, (-1, _GROUP)), bits)]
        return _bytes(*parts, k[:, :, whole:], v[:, :, whole:])

    def unpack(data: torch.Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Rows:
        layers, heads, tokens, dim = shape
        groups, rest = divmod(tokens, _GROUP)
        reader = _Reader(data)
        if outliers:
            at = reader.take((layers, heads, groups), torch.uint8).long()
            rows = [reader.take((layers, heads, groups, 1, dim), dtype).float() for _ in range(2)]
        k = _from_grouped(reader, (layers, heads, groups, dim, _GROUP), bits).transpose(3, 4)
        v = _from_grouped(reader, (layers, heads, groups, _GROUP, dim // _GROUP, _GROUP), bits).flatten(-2)
        if outliers:
            index = at[..., None, None].expand(*at.shape, 1, dim)
            k, v = k.scatter(3, index, rows[0]), v.scatter(3, index, rows[1])
        tails = [reader.take((layers, heads, rest, dim), dtype).float() for _ in range(2)]
        return torch.cat((k.flatten(2, 3), tails[0]), 2), torch.cat((v.flatten(2, 3), tails[1]), 2)

    return ComparisonFormat(name, pack, unpack)


COMPARISON: dict[str, ComparisonFormat] = {
    form.name: form
    for form in (
        _twice("int8", _int8, _from_int8),
        _twice("int4", _int4, _from_int4),
        _twice("fp8_e4m3", _fp8, _from_fp8),
        _kivi("kivi4", 4),
        _kivi("kivi2", 2),
        _kivi("ott", 2, outliers=True),
    )
}
