"""How vLLM is started for a cache: arguments, refusals, failures, and what a start must not leave behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentcache import AgentCache, CacheConfig, ConfigError, EngineDeadError, UnsupportedModelError
from agentcache.engine import arguments as engine_arguments
from agentcache.engine import launch
from agentcache.engine.arguments import IN_CORE, engine_args, import_vllm
from agentcache.engine.launch import EngineStart
from tests.models import REFUSED


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Environment, main module and processes are after each test what they were before it."""
    import_vllm()  # it changes the environment itself
    environment, spec = _environment(), sys.modules["__main__"].__spec__
    children = {c.pid for c in psutil.Process().children(recursive=True)}
    yield
    assert _environment() == environment
    assert sys.modules["__main__"].__spec__ is spec
    # multiprocessing keeps one tracker of shared memory for the whole process.
    new = [c for c in psutil.Process().children(recursive=True) if c.pid not in children]
    assert not [c for c in new if "resource_tracker" not in " ".join(c.cmdline())]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def test_the_settings_of_a_cache_become_engine_arguments(tmp_path: Path) -> None:
    config = CacheConfig.build(
        dtype="float32",
        kv_bytes=3 << 20,
        host_bytes=5 << 20,
        max_num_seqs=7,
        connector={"save_tokens_per_step": 96},
        engine_args={"long_prefill_token_threshold": 11},
    )
    arguments = engine_args(config, str(tmp_path))
    assert (arguments.model, arguments.dtype, arguments.block_size, arguments.max_num_seqs) == (
        str(tmp_path),
        "float32",
        32,
        7,
    )
    assert arguments.kv_cache_memory_bytes == 3 << 20 and arguments.long_prefill_token_threshold == 11
    assert arguments.enable_prefix_caching and arguments.max_logprobs == -1
    transfer = arguments.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("AgentCacheConnector", "kv_both")
    assert transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_extra_config["host_bytes"] == 5 << 20
    assert transfer.kv_connector_extra_config["save_tokens_per_step"] == 96


def test_one_worker_lives_in_the_engines_core_and_more_or_a_named_executor_as_vllm_has_them(tmp_path: Path) -> None:
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if not current_platform.is_cpu():
        pytest.skip("on GPUs vLLM does so by itself")

    def executor(**given: Any) -> Any:
        return engine_args(CacheConfig.build(engine_args=given), str(tmp_path)).distributed_executor_backend

    assert executor() == executor(tensor_parallel_size=1) == IN_CORE
    assert resolve_obj_by_qualname(IN_CORE) is UniProcExecutor
    for more in ("tensor", "pipeline", "prefill_context", "data"):
        assert executor(**{f"{more}_parallel_size": 2}) is None
    assert executor(distributed_executor_backend="mp") == "mp"


def test_a_worker_in_the_core_has_a_thread_for_each_of_its_cores_and_may_use_all_of_them(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("on GPUs vLLM does so by itself")

    def variables(config: CacheConfig) -> dict[str, str]:
        with launch._environment(config, None):
            vllm_config = engine_args(config, str(tiny("llama"))).create_engine_config()
            launch._set_threads(vllm_config)
            return {name: os.environ[name] for name in os.environ if name.startswith(("OMP_", "GOMP_"))}

    for name in ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)
    small = {"max_model_len": 512, "kv_bytes": 1 << 24}
    found = variables(CacheConfig.build(**small))
    cores = found["OMP_PLACES"].strip("{}").split(",")
    assert found == {
        "OMP_NUM_THREADS": str(len(cores)),
        "OMP_PLACES": f"{{{','.join(cores)}}}",
        "OMP_PROC_BIND": "true",
    }
    assert {int(core) for core in cores} <= os.sched_getaffinity(0)
    assert not variables(CacheConfig.build(**small, engine_args={"distributed_executor_backend": "mp"}))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert not variables(CacheConfig.build(**small))


def test_the_kv_space_is_a_quarter_of_the_free_memory_unless_the_environment_says_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        size = engine_args(CacheConfig.build(), str(tmp_path)).kv_cache_memory_bytes
        assert 0 < size <= psutil.virtual_memory().total / 4
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        assert engine_args(CacheConfig.build(), str(tmp_path)).kv_cache_memory_bytes is None


@pytest.mark.parametrize(("able", "auto"), [(True, "auto"), (False, "float32")])
def test_a_cpu_without_16_bit_products_computes_in_32_bits_unless_told_otherwise(
    able: bool, auto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_arguments, "multiplies_16_bit", lambda: able)
    assert engine_args(CacheConfig.build(), str(tmp_path)).dtype == auto
    assert engine_args(CacheConfig.build(dtype="bfloat16"), str(tmp_path)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"kv_cache_dtypes": "fp8"}, "did you mean kv_cache_dtype"),
        ({"xyzzy": 1}, "no engine argument 'xyzzy'$"),
        ({"seed": 1}, "use the cache's own setting 'seed'"),
        ({"kv_transfer_config": {}}, "setting 'connector'"),
    ],
)
def test_engine_arguments_that_vllm_does_not_know_or_the_cache_sets_are_refused(
    given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine_args(CacheConfig.build(engine_args=given), "m")


REASONS = {"gemma3": "2 of its 4 layers use sliding-window", "deepseek_mla": "MLA", "qwen2_mrope": "M-RoPE"}


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_recovered_is_refused_before_a_process_starts(
    kind: str, tiny: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        AgentCache(tiny(kind), max_model_len=1024)
    (reason,) = refused.value.reasons
    assert REASONS[kind] in reason and reason in str(refused.value)


def test_a_quantised_resident_cache_is_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"quantised \(fp8\)"):
        AgentCache(tiny("llama"), engine_args={"kv_cache_dtype": "fp8"})


def test_settings_that_vllm_refuses_are_a_config_error_in_its_words(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len \(999999\) is greater than the derived max_model_len"):
        AgentCache(tiny("llama"), max_model_len=999_999)
    with pytest.raises(ConfigError, match="there is no model"):
        AgentCache("/no/such/folder")
    with pytest.raises(ConfigError, match="vLLM does not accept these settings for no-such/model-at-all"):
        AgentCache("no-such/model-at-all")
    with pytest.raises(ConfigError, match="unknown policy 'nope'"):
        AgentCache(tiny("llama"), policy="nope")


@pytest.mark.engine
def test_a_start_that_takes_too_long_is_ended(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(EngineDeadError, match=r"did not start within start_timeout_s=1; give it more time") as late:
        AgentCache(tiny("llama"), start_timeout_s=1.0)
    _forget_log(late.value)


@pytest.mark.engine
def test_an_engine_that_cannot_start_says_why(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(EngineDeadError, match="larger than the available KV cache memory") as failed:
        AgentCache(tiny("llama"), dtype="float32", kv_bytes=1 << 20, max_model_len=4096)
    assert "Traceback" in _forget_log(failed.value)


@pytest.mark.engine
def test_an_interrupt_ends_a_start(tiny: Callable[[str], Path]) -> None:
    settings = {"dtype": "float32", "kv_bytes": 64 << 20, "max_model_len": 1024}
    script = f"from agentcache import AgentCache\nAgentCache({str(tiny('llama'))!r}, **{settings!r})"
    # Of its own group, as a shell starts it: the engine's processes are interrupted by us, not by the terminal.
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        process = psutil.Process(started.pid)
        deadline = time.monotonic() + 120
        while not (children := process.children(recursive=True)):  # vLLM's EngineCore
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=120)
    assert started.returncode == -signal.SIGINT, said
    assert "KeyboardInterrupt" in said
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_a_start_that_was_given_up_before_it_began_starts_nothing(tiny: Callable[[str], Path]) -> None:
    start = EngineStart(CacheConfig.build(max_model_len=1024), str(tiny("llama")))
    start.give_up()
    with pytest.raises(EngineDeadError, match="given up"):
        start.run()


def _forget_log(error: EngineDeadError) -> str:
    """Removes the log that a failed start names, if it names one, and returns what it said."""
    named = re.search(r"Its log, (\S+), says:", str(error))
    if named is None:
        return ""
    log = Path(named[1])
    text = log.read_text()
    log.unlink()
    return text
