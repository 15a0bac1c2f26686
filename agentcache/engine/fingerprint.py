"""What a checkpoint is made for: another model, dtype, rotary embedding or format must never be restored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from agentcache.kernels import FORMAT_VERSION
from agentcache.store.payloads import BLOB_VERSION
from agentcache.weights_digest import weights_digest

__all__ = ["fingerprint"]

_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "name_or_path")


def fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """Returns names and values that a stored version must share with an engine to be restored by it.

    Weights are told apart by the length of each file and by stretches spread over it. Two engines with the same fingerprint
    compute the same KV up to the rounding of their kernels.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    (group,) = kv_cache_config.kv_cache_groups
    spec: Any = group.kv_cache_spec
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _NOT_THE_MODEL}
    return {
        "architecture": ",".join(model.hf_config.architectures or [type(model.hf_config).__name__]),
        "config": _digest(json.dumps(config, sort_keys=True, default=str).encode()),
        "weights": _weights(model.model, model.revision),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(spec.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or "none"),
        "layers": str(len(group.layer_names)),
        "kv_heads": str(spec.num_kv_heads),
        "head_dim": str(spec.head_size),
        "ranks": str(parallel.tensor_parallel_size),
        "device": vllm_config.device_config.device_type,
        "format": f"{BLOB_VERSION}.{FORMAT_VERSION}",
    }


def _digest(data: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def _weights(model: str, revision: str | None) -> str:
    """Returns a digest of a folder's weights, or the name of a model that is not a folder."""
    folder = Path(model)
    if not folder.exists():
        return f"{model}@{revision or 'main'}"
    return weights_digest(folder)
