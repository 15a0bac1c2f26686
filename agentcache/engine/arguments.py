"""A cache's settings as vLLM's engine arguments, and vLLM imported without its noise."""

from __future__ import annotations

import contextlib
import difflib
import gc
import logging
import os
import platform
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from agentcache.config import CacheConfig
from agentcache.errors import AgentCacheError, ConfigError

__all__ = ["engine_args", "import_vllm", "is_quiet", "multiplies_16_bit"]

logger = logging.getLogger(__name__)

WORKER_EXTENSION: Final = "agentcache.engine.worker_extension.WorkerExtension"
# vLLM's own executor for one worker, under a path: by its name "uni" vLLM replaces it on CPUs, where it cannot set the threads of a
# process that runs already. `launch` sets them before.
IN_CORE: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_WORKERS: Final = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
)
# Set by the cache itself: a second value in `engine_args` would contradict its own settings.
RESERVED: Final = {
    "model": "model",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "kv_cache_memory_bytes": "kv_bytes",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "seed": "seed",
    "kv_transfer_config": "connector",
    "worker_extension_cls": "connector",
}


def is_quiet() -> bool:
    """Whether vLLM's output is kept from the terminal: unless VLLM_LOGGING_LEVEL asks for more than errors."""
    return os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper() == "ERROR"


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Holds the garbage collector: an import makes objects that stay, and looking at them is an eighth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def import_vllm() -> None:
    """Imports vLLM, and without its start-up noise when it shall be quiet."""
    if is_quiet():
        logging.getLogger("vllm").setLevel(logging.ERROR)
    with warnings.catch_warnings(), _no_collections():
        warnings.simplefilter("ignore")
        try:
            import vllm.engine.arg_utils
            import vllm.v1.engine.async_llm  # noqa: F401
        except ImportError as error:
            raise AgentCacheError(
                f"vLLM cannot be imported: {error}\n"
                "Install one of the two engines: pip install 'agentcache-kv[cpu]' or 'agentcache-kv[gpu]'."
            ) from error


def _default_kv_bytes() -> int:
    """Returns a quarter of the memory that is free on the node with the least of it."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    return int(min(get_memory_node_info(node).available_memory for node in get_visible_memory_node()) // 4)


def multiplies_16_bit() -> bool:
    """Whether this CPU's matrix products of 16-bit numbers are not emulated, which is a hundred times slower than 32-bit ones."""
    import torch

    # x86 without AVX-512; torch has no public name for it.
    return platform.machine() not in ("x86_64", "AMD64") or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _dtype(config: CacheConfig, *, on_cpu: bool) -> str:
    """Returns the dtype of the engine: where `auto` would be emulated, float32."""
    if config.dtype != "auto" or not on_cpu or multiplies_16_bit():
        return config.dtype
    logger.info("dtype='auto' is float32 here: this CPU multiplies 16-bit numbers in software")
    return "float32"


def _is_parallel(config: CacheConfig) -> bool:
    """Whether there is more than one worker."""
    return any(config.engine_args.get(name, 1) != 1 for name in _WORKERS)


def engine_args(config: CacheConfig, model: str) -> Any:
    """Returns the `AsyncEngineArgs` of a cache.

    Args:
        config: The cache's settings.
        model: Folder or hub id.

    Raises:
        ConfigError: `config.engine_args` names an unknown argument or one that the cache sets itself.
    """
    import_vllm()
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    known = {f.name for f in fields(AsyncEngineArgs)}
    for name in config.engine_args:
        if name in RESERVED:
            raise ConfigError(f"engine_args may not hold {name!r}: use the cache's own setting {RESERVED[name]!r}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise ConfigError(
                f"engine_args: vLLM has no engine argument {name!r}"
                + (f"; did you mean {', '.join(near)}?" if near else "")
            )
    on_cpu = current_platform.is_cpu()
    kv_bytes = config.kv_bytes
    if kv_bytes is None and on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        kv_bytes = _default_kv_bytes()
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": _dtype(config, on_cpu=on_cpu),
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "kv_cache_memory_bytes": kv_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "seed": config.seed,
        "enable_prefix_caching": True,
        "enforce_eager": on_cpu,
        "max_logprobs": -1,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "distributed_executor_backend": IN_CORE if on_cpu and not _is_parallel(config) else None,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="AgentCacheConnector",
            kv_connector_module_path="agentcache.engine.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=config.to_connector().model_dump(mode="json"),
        ),
    }
    given = {name: value for name, value in (arguments | config.engine_args).items() if value is not None}
    return AsyncEngineArgs(**given)
