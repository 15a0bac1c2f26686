"""The only place that knows which vLLM version it runs on."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from agentcache.errors import SelfCheckError

__all__ = ["attention_layers", "model_forward", "most_runs", "rotary_modules"]


def attention_layers(vllm_config: VllmConfig, names: list[str]) -> dict[str, Attention]:
    """Returns the attention modules of the given layer names, in that order.

    Raises:
        SelfCheckError: A layer is no plain `Attention` (e.g. MLA).
    """
    context = vllm_config.compilation_config.static_forward_context
    layers = {name: context[name] for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, Attention):
            raise SelfCheckError(f"layer {name} is a {type(layer).__name__}, not a plain attention layer")
    return layers


def model_forward(model: torch.nn.Module, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns the hidden states `[T, hidden]` of one forward pass inside an active forward context."""
    out = model(input_ids=input_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
    return out[0] if isinstance(out, tuple) else out


def rotary_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the distinct rotary embedding modules of a model."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    seen: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            seen[id(module)] = module
    return list(seen.values())


def most_runs(backend: Any, vllm_config: VllmConfig) -> int:
    """Returns how many runs one forward may have.

    Several backends size buffers by `max_num_seqs`; the CPU's has none.
    """
    if backend.get_name() == "CPU_ATTN":
        return int(vllm_config.scheduler_config.max_num_batched_tokens)
    return int(vllm_config.scheduler_config.max_num_seqs)
