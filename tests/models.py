"""Tiny random-weight models of every form that agentcache supports or refuses, small enough to start in seconds.

Weights are drawn so that attention matters. Common initialisers (std 0.02) give near-uniform attention whose output vanishes
beside the residual stream, and then stale KV would pass every test. Here each linear map keeps the scale of its input (std
`gain / sqrt(fan_in)`), queries and keys are larger still, so that scores have a standard deviation of about 4 and each head reads
a few tokens; embeddings and head are untied, so that the greedy reply is not an echo of the last token.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from agentcache.weights import resolve_model

__all__ = ["KINDS", "REFUSED", "SUPPORTED", "make_tiny"]

SUPPORTED = ("llama", "llama3_rope", "qwen2", "qwen3", "mistral", "glm4", "qwen3_moe", "llama_w8a8")
REFUSED = ("gemma3", "deepseek_mla", "qwen2_mrope")
KINDS = SUPPORTED + REFUSED

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
COMMON: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
# Per-channel int8 weights, per-token int8 activations scaled on the fly.
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def _config(kind: str) -> Any:
    import transformers as t

    builders: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**COMMON, head_dim=32),
        "llama_w8a8": lambda: t.LlamaConfig(**COMMON, head_dim=32),
        "llama3_rope": lambda: t.LlamaConfig(**COMMON, head_dim=32, rope_parameters=LLAMA3_ROPE),
        "qwen2": lambda: t.Qwen2Config(**COMMON, use_sliding_window=False),
        "qwen3": lambda: t.Qwen3Config(**COMMON, head_dim=64),
        "mistral": lambda: t.MistralConfig(**COMMON, head_dim=32, sliding_window=None),
        "glm4": lambda: t.Glm4Config(**COMMON, head_dim=64, partial_rotary_factor=0.5, attention_bias=True),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **COMMON, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True
        ),
        "gemma3": lambda: t.Gemma3TextConfig(
            **COMMON,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "deepseek_mla": lambda: t.DeepseekV2Config(
            **(COMMON | {"num_key_value_heads": 4}),
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=COMMON["num_hidden_layers"],
        ),
        # A text model with M-RoPE sections: the vision models that have them cannot be inspected without torchvision.
        "qwen2_mrope": lambda: t.Qwen2Config(
            **COMMON,
            use_sliding_window=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        ),
    }
    if kind not in builders:
        raise ValueError(f"no tiny model {kind!r}; there are {', '.join(builders)}")
    return builders[kind]()


def _gain(name: str, scale: float) -> float:
    """Returns the factor that the map `name` applies to the standard deviation of its input."""
    if any(part in name for part in ("q_proj", "k_proj", "kv_a_proj", "kv_b_proj")):
        return 2.0 * scale
    return scale


@torch.no_grad()
def _fill(model: torch.nn.Module, seed: int, scale: float) -> None:
    for name, weight in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        noise = torch.randn(weight.shape, generator=generator)
        if "embed_tokens" in name:
            weight.copy_(noise)
        elif "norm" in name:
            # q/k norm undoes the gain of the projections, so it carries it instead.
            centre = 2.0 * scale if "q_norm" in name or "k_norm" in name else 1.0
            weight.copy_(centre * (1 + 0.1 * noise))
        elif weight.dim() == 1:
            weight.copy_(0.5 * scale * noise)
        else:
            weight.copy_(_gain(name, scale) * noise / weight.shape[-1] ** 0.5)


def _quantise(folder: Path) -> None:
    """Rewrites a model folder's linear maps as symmetric int8 with one float scale an output channel."""
    path = folder / "model.safetensors"
    out: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path).items():
        if not name.endswith("proj.weight"):
            out[name] = weight
            continue
        step = weight.abs().amax(dim=1, keepdim=True) / 127
        out[name] = (weight / step).round().to(torch.int8)
        out[f"{name}_scale"] = step
    save_file(out, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": W8A8}, indent=2))


def make_tiny(kind: str, folder: Path, *, scale: float = 1.0, seed: int = 0) -> Path:
    """Writes the tiny model `kind` into `folder` and returns it: float32 safetensors, config and SmolLM2's tokenizer.

    Args:
        kind: One of `KINDS`.
        folder: Made when missing.
        scale: Multiplies the gain of every linear map; larger makes attention peakier and stale KV more wrong.
        seed: Weights are equal for equal kind, scale and seed.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(_config(kind), dtype=torch.float32)
    _fill(model, seed, scale)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer = Path(resolve_model("smollm2"))
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    if kind == "llama_w8a8":
        _quantise(folder)
    return folder
