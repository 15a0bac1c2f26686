"""The float32 twins of the kernels: plain torch, a row at a time where that is clearer. Slow, and what the fast ones are tested by.

Letters: L layers, H KV heads, Hq query heads, N or T tokens, n tokens of a block, D head dim, G value scale groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentcache.kernels.formats import BLOCK, PackedFormat, Tag
from agentcache.kernels.layout import PageLayout
from agentcache.kernels.packed import Piece, Rotation, rotary_planes

__all__ = [
    "attention_mass",
    "gather_rows",
    "pack",
    "restore",
    "rotate",
    "scatter_rows",
    "unpack",
    "value_residual",
]

_TINY = 2.0**-100  # a scale below this stands for zero, so that its reciprocal stays finite


def _cells(layout: PageLayout, cells: torch.Tensor, table: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Returns the element offset of every row, int64 `[H, N, D]`."""
    position = torch.arange(start, start + length)
    page = table.cpu().long()[position // layout.shape[1]]
    return page[None, :, None] * layout.page_stride + cells[:, position % layout.shape[1]]


def _flat(page: torch.Tensor) -> torch.Tensor:
    size = page.untyped_storage().nbytes() // page.element_size() - page.storage_offset()
    return torch.as_strided(page, (size,), (1,), page.storage_offset())


def gather_rows(
    pages: Sequence[torch.Tensor], layout: PageLayout, table: torch.Tensor, start: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns copies of the K and V rows of positions `[start, start + length)`, each `[L, H, N, D]` in the KV dtype."""
    k_at, v_at = (_cells(layout, c, table, start, length).to(pages[0].device) for c in (layout.k_cells, layout.v_cells))
    flat = [_flat(page) for page in pages]
    return torch.stack([f[k_at] for f in flat]), torch.stack([f[v_at] for f in flat])


def scatter_rows(
    pages: Sequence[torch.Tensor], layout: PageLayout, table: torch.Tensor, dst: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Writes K and V rows `[L, H, N, D]` at positions from `dst` on; every other cell keeps its value."""
    k_at, v_at = (_cells(layout, c, table, dst, k.shape[2]).to(k.device) for c in (layout.k_cells, layout.v_cells))
    for layer, page in enumerate(pages):
        _flat(page)[k_at] = k[layer].to(page.dtype)
        _flat(page)[v_at] = v[layer].to(page.dtype)


def _round_up(x: torch.Tensor, drop: int) -> torch.Tensor:
    """Returns positive float32 without their lowest `drop` mantissa bits, rounded up; 0 for what is below `_TINY`."""
    bits = x.float().contiguous().view(torch.int32)
    rounded = (((bits + ((1 << drop) - 1)) >> drop) << drop).view(torch.float32)
    return torch.where(x < _TINY, 0.0, rounded)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def _int8(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns symmetric int8 codes along `dim` and their bfloat16 scales (`dim` kept)."""
    scale = _round_up(x.abs().amax(dim, keepdim=True) / 127.0, 16)
    return (x * _inverse(scale)).round().clamp(-127, 127).to(torch.int8), scale.to(torch.bfloat16)


def _uint4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 4-bit codes of the last dimension and their words: 12 bits of scale, 4 bits of zero point."""
    high, low = x.amax(-1, keepdim=True).clamp_min(0), x.amin(-1, keepdim=True).clamp_max(0)
    scale = _round_up((high - low) / 15.0, 19)
    inverse = _inverse(scale)
    zero = (-low * inverse).round().clamp(0, 15)
    codes = ((x * inverse).round() + zero).clamp(0, 15)
    word = ((scale.view(torch.int32) >> 19) << 4) | zero.int()
    return codes.to(torch.uint8), word.to(torch.int16)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of `[L, H, ...]` as `[L, H, size]`."""
    return x.flatten(2).contiguous().view(torch.uint8)


def pack(k: torch.Tensor, v: torch.Tensor, tag: Tag) -> torch.Tensor:
    """Returns the packed bytes of K and V rows `[L, H, N, D]`, uint8, as `formats` lays them out."""
    layers, heads, tokens, dim = k.shape
    form = PackedFormat(tag, layers, heads, dim, k.element_size())
    out = []
    for start in range(0, tokens, form.group_tokens):
        kg, vg = k[:, :, start : start + form.group_tokens], v[:, :, start : start + form.group_tokens]
        if tag is not Tag.EXACT:
            kg, k_scale = _int8(kg.float(), 2)
            vg, words = _value_codes(vg.float(), form)
            parts = [_bytes(k_scale)]
        else:
            parts, words = [], vg[..., :0]
        for at in range(0, kg.shape[2], BLOCK):
            parts.append(_bytes(kg[:, :, at : at + BLOCK].transpose(2, 3)))
            parts += [_bytes(words[:, :, at : at + BLOCK]), _bytes(vg[:, :, at : at + BLOCK])]
        out.append(torch.cat(parts, 2).flatten(1))
    return torch.cat(out, 1).flatten()


def _value_codes(v: torch.Tensor, form: PackedFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the value bytes of each row `[L, H, n, D or D / 2]` and their words `[L, H, n, G]`."""
    grouped = v.unflatten(-1, (form.value_groups, -1))
    if form.tag is Tag.K8V8:
        codes, scale = _int8(grouped, -1)
        return codes.flatten(-2), scale.squeeze(-1)
    codes, words = _uint4(grouped)
    low, high = codes.flatten(-2).chunk(2, -1)
    return low | high << 4, words.squeeze(-1)


def unpack(
    data: torch.Tensor, form: PackedFormat, tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the K and V rows of a packed run, each `[L, H, N, D]`: float32, or the KV dtype itself when exact.

    Args:
        data: uint8 bytes of the run.
        form: Its format.
        tokens: N.
        dtype: The KV dtype.
    """
    layers, heads, dim = form.layers, form.kv_heads, form.head_dim
    data = data.view(layers, -1)
    ks, vs = [], []
    at = 0
    for start in range(0, tokens, form.group_tokens):
        size = min(form.group_tokens, tokens - start)
        group = data[:, at : at + heads * form.group_bytes(size)].unflatten(1, (heads, -1))
        at += heads * form.group_bytes(size)
        scale = group[..., : form.scale_bytes].contiguous().view(torch.bfloat16).float()
        offset = form.scale_bytes
        for block in range(0, size, BLOCK):
            n = min(BLOCK, size - block)
            k_end = offset + n * dim * (form.element_size if form.tag is Tag.EXACT else 1)
            v_start = k_end + 2 * n * form.value_groups
            end = offset + n * form.token_bytes
            k, words, v = group[..., offset:k_end], group[..., k_end:v_start], group[..., v_start:end]
            if form.tag is Tag.EXACT:
                k, v = k.contiguous().view(dtype), v.contiguous().view(dtype)
                k = k.unflatten(-1, (dim, n))
            else:
                k = k.contiguous().view(torch.int8).float().unflatten(-1, (dim, n)) * scale[..., None]
                v = _value_rows(words.contiguous().view(torch.int16), v.contiguous(), form, n)
            ks.append(k.transpose(2, 3))
            vs.append(v.unflatten(-1, (n, dim)) if v.dim() == 3 else v)
            offset = end
    return torch.cat(ks, 2), torch.cat(vs, 2)


def _value_rows(words: torch.Tensor, codes: torch.Tensor, form: PackedFormat, n: int) -> torch.Tensor:
    """Returns float32 values `[L, H, n, D]` of words `[L, H, n * G]` and code bytes."""
    words = words.unflatten(-1, (n, form.value_groups, 1))
    if form.tag is Tag.K8V8:
        rows = codes.view(torch.int8).float().unflatten(-1, (n, form.value_groups, -1))
        return (rows * words.view(torch.bfloat16).float()).flatten(-2)
    codes = codes.unflatten(-1, (n, -1))
    rows = torch.cat((codes & 15, codes >> 4), -1).float().unflatten(-1, (form.value_groups, -1))
    bits = words.int() & 0xFFFF
    scale = ((bits >> 4) << 19).view(torch.float32)
    return ((rows - (bits & 15)) * scale).flatten(-2)


def rotate(k: torch.Tensor, rotation: Rotation, shift: int) -> torch.Tensor:
    """Returns float32 keys `[..., D]` turned by `shift` positions."""
    cos, sin = (x.to(k.device) for x in rotation.angles(shift))
    first, second = (x.to(k.device) for x in rotary_planes(rotation))
    out = k.float().clone()
    a, b = out[..., first], out[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def restore(
    piece: Piece,
    form: PackedFormat,
    pages: Sequence[torch.Tensor],
    layout: PageLayout,
    table: torch.Tensor,
    rotation: Rotation | None,
) -> None:
    """Dequantises a piece, turns its keys, rounds once to the KV dtype and writes its rows."""
    k, v = unpack(piece.run.data, form, piece.run.tokens, pages[0].dtype)
    k, v = (x[:, :, piece.start : piece.start + piece.length] for x in (k, v))
    if piece.shift:
        assert rotation is not None
        k = rotate(k, rotation, piece.shift)
    scatter_rows(pages, layout, table, piece.dst, k, v)


def attention_mass(queries: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns the mean attention of the queries on each key, float32 `[T]`.

    Args:
        queries: `[Q, Hq, D]`, rotated.
        positions: `[Q]`; a query sees the keys up to its own position.
        keys: `[H, T, D]`, rotated.
        scale: Factor of the logits.
    """
    heads, tokens, _ = keys.shape
    grouped = queries.float().unflatten(1, (heads, -1))
    logits = torch.einsum("qhgd,htd->qhgt", grouped, keys.float()) * scale
    hidden = torch.arange(tokens, device=keys.device) > positions[:, None].to(keys.device)
    mass = logits.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    return mass.flatten(0, 2).mean(0)


def value_residual(v: torch.Tensor) -> torch.Tensor:
    """Returns e^V of PatchKV's risk, float32 `[N]`: `‖V - V4‖ / ‖V‖` of each token over layers and heads; V is `[L, H, N, D]`."""
    form = PackedFormat(Tag.K8V4, v.shape[0], v.shape[1], v.shape[3], v.element_size())
    codes, words = _value_codes(v.float(), form)
    rows = _value_rows(words.flatten(2), codes.flatten(2), form, v.shape[2])
    error, norm = ((x**2).sum((0, 1, 3)) for x in (rows - v.float(), v.float()))
    return torch.where(norm > 0, (error / norm).sqrt(), 0.0)
