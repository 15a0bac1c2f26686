"""What is measured: the page layout of the backend that would run here, and KV that looks like a model's or is one's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from agentcache.kernels import PageLayout, Strides

__all__ = ["Material", "attention_isa", "layout_for", "real_kv", "synthetic_kv"]


@dataclass(frozen=True, eq=False)
class Material:
    """KV rows to measure with.

    Attributes:
        name: Where they come from.
        k: Keys `[L, H, N, D]`, rotated.
        v: Values.
    """

    name: str
    k: torch.Tensor
    v: torch.Tensor


def attention_isa(device: torch.device, dtype: torch.dtype) -> str:
    """Returns the name of the attention whose pages are used: vLLM's choice on CPU, FlashAttention's on GPU."""
    if device.type != "cpu":
        return "flash_attn"
    if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return "amx"
    return "vec"


def layout_for(isa: str, heads: int, block: int, dim: int, pages: int) -> PageLayout:
    """Returns the page layout of an attention.

    vec: K transposed inside a page, V plain; amx: K in pairs of dimensions over 16 tokens, V in pairs of tokens;
    flash_attn: all K pages before all V pages, the heads of a token together.
    """
    half = heads * block * dim
    if isa == "flash_attn":
        rows = (dim, heads * dim, 1)
        return PageLayout.from_strides((heads, block, dim), half, Strides(0, *rows), Strides(pages * half, *rows))
    head = 2 * block * dim
    if isa == "vec":
        k, v = Strides(0, head, 1, block), Strides(block * dim, head, dim, 1)
        return PageLayout.from_strides((heads, block, dim), 2 * half, k, v)
    h, t, d = torch.arange(heads).view(-1, 1, 1), torch.arange(block).view(1, -1, 1), torch.arange(dim).view(1, 1, -1)
    k_cells = h * head + t // 16 * 16 * dim + d // 2 * 32 + t % 16 * 2 + d % 2
    v_cells = h * head + block * dim + t // 2 * 2 * dim + d * 2 + t % 2
    return PageLayout.from_cells(2 * half, k_cells, v_cells)


def synthetic_kv(layers: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Material:
    """Returns KV with what matters to quantisers: key channels of very different size and offset, values with heavy tails."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    spread = (normal(layers, heads, 1, dim) * 0.8).exp()
    k = normal(layers, heads, 1, dim) * 4 * spread + normal(layers, heads, tokens, dim) * spread
    v = normal(layers, heads, tokens, dim) * (normal(layers, heads, tokens, 1) * 0.3).exp() * 0.5
    return Material(
        "synthetic: key channels of log-normal size with offsets, values of log-normal rows", k.to(dtype), v.to(dtype)
    )


def real_kv(model: Path, tokens: int, dtype: torch.dtype, text: Path | None) -> Material:
    """Returns the KV that a model computes for a text; needs transformers.

    Args:
        model: Model folder.
        tokens: Most tokens.
        dtype: KV dtype.
        text: A text file; None takes the source of these kernels.

    Raises:
        ValueError: The text is shorter than `tokens`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sources = sorted(Path(__file__).parent.parent.glob("*.py"))
    words = text.read_text() if text is not None else "\n".join(path.read_text() for path in sources)
    ids = AutoTokenizer.from_pretrained(model)(words, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(f"the text has {ids.shape[1]} tokens, fewer than --tokens {tokens}")
    with torch.inference_mode():
        layers = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)(ids, use_cache=True).past_key_values.layers
    k, v = (torch.stack([getattr(layer, name)[0] for layer in layers]) for name in ("keys", "values"))
    return Material(
        f"{model.name} on {text.name if text else 'the source of these kernels'}", k.contiguous(), v.contiguous()
    )
