"""What this release cannot recover, found before anything runs. Each reason is one sentence."""

from __future__ import annotations

from typing import Any

__all__ = ["check_config", "check_kv_cache_config"]

_TOKEN_KEYED = ("LMCache", "HF3FS", "hf3fs")


def check_config(config: Any) -> list[str]:
    """Returns why an engine configuration cannot be recovered; an empty list when it can.

    Args:
        config: vLLM's `VllmConfig`.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    reasons: list[str] = []

    def refuse(when: Any, reason: str) -> None:
        if when:
            reasons.append(reason)

    refuse(model.use_mla, "it uses multi-head latent attention (MLA), whose cache holds no keys that can be rotated")
    refuse(model.is_encoder_decoder, "it is an encoder-decoder model")
    refuse(model.runner_type != "generate", f"the engine runs as {model.runner_type!r}, not as a generator")
    refuse(getattr(model, "is_hybrid", False), "it is a hybrid model: part of its state is recurrent, not KV")
    refuse(getattr(model, "is_attention_free", False), "it has no attention")
    refuse(model.uses_mrope, "it uses multimodal rotary positions (M-RoPE)")
    refuse(model.is_multimodal_model, "it is multimodal: its prompt is more than token ids")
    window = _sliding_window(model, text)
    refuse(window, f"{window} use sliding-window attention")
    refuse(getattr(text, "attention_chunk_size", None), "it uses chunked local attention")
    refuse(_without_rotary(text), "some of its layers have no rotary embedding (NoPE), others have")
    dtype = str(cache.cache_dtype)
    refuse(dtype not in ("auto", "bfloat16", "float16", "float32"), f"its resident KV cache is quantised ({dtype})")
    refuse(config.lora_config is not None, "LoRA is enabled: adapters change the KV")
    refuse(parallel.pipeline_parallel_size > 1, "pipeline parallelism is on")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        refuse(getattr(parallel, name, 1) > 1, f"context parallelism is on ({name}={getattr(parallel, name, 1)})")
    refuse(parallel.data_parallel_size > 1 and model.is_moe, "an MoE model runs data parallel")
    refuse(config.speculative_config is not None, "speculative decoding is on")
    refuse(getattr(model, "enable_sleep_mode", False), "sleep mode is on: it discards KV behind our back")
    refuse(getattr(model, "enable_prompt_embeds", False), "prompt embeddings are enabled")
    transfer = config.kv_transfer_config
    if transfer is not None:
        refuse(
            getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute",
            'kv_load_failure_policy is not "recompute": a failed restore would fail the request',
        )
        others = (transfer.kv_connector_extra_config or {}).get("connectors", [])
        keyed = [c.get("kv_connector", "") for c in others if str(c.get("kv_connector", "")).startswith(_TOKEN_KEYED)]
        refuse(
            keyed,
            f"{', '.join(keyed)} beside agentcache keys KV by token ids and would publish approximate blocks as exact",
        )
    return reasons


def _sliding_window(model: Any, text: Any) -> str:
    """Returns which layers use a window, in words, or an empty string."""
    types = getattr(text, "layer_types", None)
    if types:
        windowed = sum("sliding" in str(kind) or "chunked" in str(kind) for kind in types)
        other = sorted({str(k) for k in types} - {"full_attention"})
        if windowed:
            return f"{windowed} of its {len(types)} layers"
        return f"its {', '.join(other)} layers do not all have full attention or" if other else ""
    window = model.get_sliding_window()
    return f"its layers (window {window})" if window else ""


def _without_rotary(text: Any) -> bool:
    """Whether the configuration names layers without rotary embedding among others (Granite, SmolLM3, Llama-4)."""
    thetas = getattr(text, "layer_rope_theta", None) or ()
    flags = getattr(text, "no_rope_layers", None) or ()
    return any(not theta for theta in thetas) or len(set(flags)) > 1


def check_kv_cache_config(kv_cache_config: Any) -> list[str]:
    """Returns why the KV groups of an engine cannot be recovered; an empty list when they can.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig`.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return [f"its KV cache has {len(groups)} groups; one group of full attention is needed"]
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return [f"its KV cache is a {type(spec).__name__}, not plain full attention"]
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        return ["its layers use sliding-window or chunked attention"]
    return []
