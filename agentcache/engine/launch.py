"""Starts and stops vLLM for an `AgentCache`: engine arguments, environment, start-up checks, processes.

Three processes serve one cache: the caller, vLLM's EngineCore (scheduler) and its Worker (model). The last two are spawned with
`agentcache.engine.child` as their main module and with SIGINT blocked, so that Ctrl-C in a terminal reaches only the caller, which
aborts its request and keeps the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import difflib
import importlib.util
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from agentcache.config import CacheConfig
from agentcache.engine.child import LOG_VARIABLE
from agentcache.engine.support import check_config
from agentcache.errors import AgentCacheError, ConfigError, EngineDeadError, RequestError, UnsupportedModelError

__all__ = ["Engine", "EngineStart", "engine_args"]

WORKER_EXTENSION: Final = "agentcache.engine.worker_extension.WorkerExtension"
CHILD_MODULE: Final = "agentcache.engine.child"
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
_STOP_S: Final = 30.0
_LOG_LINES: Final = 8
_LOG_PREFIX: Final = re.compile(r"^\((?:EngineCore|Worker)\S* pid=\d+\) ERROR \S+ \S+ \[\S+\] ?")
_ERROR_LINE: Final = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
_CALL_POLL_S: Final = 0.5
_start_lock = threading.Lock()


def _quiet() -> bool:
    """Whether vLLM's output is kept from the terminal: unless VLLM_LOGGING_LEVEL asks for more than errors."""
    return os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper() == "ERROR"


def _import_vllm() -> None:
    """Imports vLLM, and without its start-up noise when it shall be quiet."""
    if _quiet():
        logging.getLogger("vllm").setLevel(logging.ERROR)
    with warnings.catch_warnings():
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


def engine_args(config: CacheConfig, model: str) -> Any:
    """Returns the `AsyncEngineArgs` of a cache.

    Args:
        config: The cache's settings.
        model: Folder or hub id.

    Raises:
        ConfigError: `config.engine_args` names an unknown argument or one that the cache sets itself.
    """
    _import_vllm()
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
        "dtype": config.dtype,
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
        "kv_transfer_config": KVTransferConfig(
            kv_connector="AgentCacheConnector",
            kv_connector_module_path="agentcache.engine.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=config.connector.model_dump(mode="json") | {"host_bytes": config.host_bytes},
        ),
    }
    given = {name: value for name, value in (arguments | config.engine_args).items() if value is not None}
    return AsyncEngineArgs(**given)


@contextmanager
def _environment(config: CacheConfig, log: Path | None) -> Iterator[None]:
    """Holds the environment that the engine's processes inherit; what it or vLLM changed is put back at the end."""
    before = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # vLLM leaves one core to the scheduler; on a small machine that is half of it.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(math.ceil(config.start_timeout_s)))
    if config.kv_bytes is not None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the engine argument
    if log is not None:
        os.environ[LOG_VARIABLE] = str(log)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _child_main() -> Iterator[None]:
    """Lets spawned processes import `CHILD_MODULE` in place of this process's main module."""
    main = sys.modules["__main__"]
    before = getattr(main, "__spec__", None)
    main.__spec__ = importlib.util.find_spec(CHILD_MODULE)
    try:
        yield
    finally:
        main.__spec__ = before


@dataclass(eq=False)
class Engine:
    """A running vLLM engine and the processes that belong to it.

    Attributes:
        llm: vLLM's `AsyncLLM`.
        log: File that its processes write to, or None when they share the caller's terminal.
    """

    llm: Any
    log: Path | None = None
    _cores: list[BaseProcess] = field(default_factory=list)
    _tree: list[Any] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # Before multiprocessing's own handler, which waits for children for ever: the last one registered runs first.
        atexit.register(self.stop)

    @property
    def pids(self) -> list[int]:
        """Process ids of EngineCore and workers, EngineCore first."""
        return [process.pid for process in self._tree]

    @property
    def kv_tokens(self) -> int:
        """Tokens that the engine's KV cache holds."""
        cache = self.llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    @property
    def dead(self) -> bool:
        """Whether the engine has died or was stopped."""
        return self._stopped.is_set() or bool(self.llm.errored)

    def death(self) -> EngineDeadError:
        """Returns the error that says what became of the engine."""
        if self._stopped.is_set():
            return EngineDeadError("this engine was stopped, by close() or restart(), before the request had ended")
        codes = [f"{p.name} {_exit_text(p.exitcode)}" for p in self._cores if p.exitcode]
        what = f" ({', '.join(codes)})" if codes else ""
        return EngineDeadError(
            f"the vLLM engine has died{what}; cache.restart() starts a new one, and every episode keeps its history."
            + _log_tail(self.log)
        )

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Returns each worker's answer to a method of `WorkerExtension`.

        Raises:
            EngineDeadError: The engine died before it answered.
            RequestError: The method failed in a worker.
        """
        answer = asyncio.ensure_future(self.llm.collective_rpc(method, args=arguments))
        try:
            # vLLM leaves calls that are open when its engine dies unanswered.
            while not answer.done():
                await asyncio.wait({answer}, timeout=_CALL_POLL_S)
                if self.dead:
                    raise self.death()
            return list(answer.result())
        except EngineDeadError:
            raise
        except Exception as error:
            raise RequestError(f"{method} failed in the engine's worker: {error}{_log_tail(self.log)}") from error
        finally:
            answer.cancel()

    def stop(self) -> None:
        """Ends the engine and all its processes. Idempotent."""
        import psutil

        if self._stopped.is_set():
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        core, handler = self.llm.engine_core, self.llm.output_handler
        loop = handler.get_loop() if handler is not None and not handler.get_loop().is_closed() else None
        if loop is not None:
            loop.call_soon_threadsafe(_end_requests, handler, self.llm.output_processor)
        self.llm.shutdown(timeout=_STOP_S)
        # vLLM leaves its ZeroMQ context open; its sockets are closed on the loop, so the context is too.
        loop.call_soon_threadsafe(core.resources.ctx.destroy, 0) if loop else core.resources.ctx.destroy(0)
        del self.llm  # its `__del__` fails when it runs as late as the interpreter's own end
        _, alive = psutil.wait_procs(self._tree, timeout=_STOP_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=_STOP_S)
        for core in self._cores:
            core.join(timeout=_STOP_S)
        if self.log is not None:
            self.log.unlink(missing_ok=True)


def _end_requests(handler: asyncio.Task[None], processor: Any) -> None:
    """Ends vLLM's output handler, which would log the end of its sockets as a failure, and tells every open request."""
    from vllm.v1.engine.exceptions import EngineDeadError as VLLMDeadError

    handler.cancel()
    processor.propagate_error(VLLMDeadError())


class EngineStart:
    """One start of an engine: blocking, and may be given up from another thread.

    Args:
        config: The cache's settings.
        model: Folder or hub id.
    """

    def __init__(self, config: CacheConfig, model: str) -> None:
        self._config = config
        self._model = model
        self._given_up = threading.Event()
        self._timed_out = False
        # Children of this process before the start; None while nothing of ours can run.
        self._before: set[int | None] | None = None

    def run(self) -> Engine:
        """Returns the engine once it is ready. Blocks SIGINT in the calling thread, so call it on a thread of its own.

        Raises:
            ConfigError: vLLM does not accept the settings.
            UnsupportedModelError: The model's KV cannot be recovered.
            EngineDeadError: The engine did not start; carries the end of its log.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        arguments = engine_args(self._config, self._model)
        log = None
        if _quiet():
            handle, name = tempfile.mkstemp(prefix="agentcache-engine-", suffix=".log")
            os.close(handle)
            log = Path(name)
        timer = threading.Timer(self._config.start_timeout_s, self._time_out)
        timer.daemon = True
        timer.start()
        try:
            # One start at a time: the environment and the main module belong to the whole process.
            with _start_lock, _environment(self._config, log), _child_main():
                return self._launch(arguments, log)
        except BaseException as error:
            self._kill()
            if log is not None and not isinstance(error, EngineDeadError):  # that one names its log
                log.unlink(missing_ok=True)
            raise
        finally:
            self._before = None
            timer.cancel()

    def give_up(self) -> None:
        """Makes `run` raise soon: kills the processes that it has started."""
        self._given_up.set()
        self._kill()

    def _time_out(self) -> None:
        self._timed_out = True
        self.give_up()

    def _launch(self, arguments: Any, log: Path | None) -> Engine:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            vllm_config = arguments.create_engine_config()
        except (ValueError, OSError, TypeError, NotImplementedError, VLLMClientError) as error:
            raise ConfigError(f"vLLM does not accept these settings for {self._model}: {_reason(error)}") from error
        if reasons := check_config(vllm_config):
            raise UnsupportedModelError(self._model, reasons)
        self._before = {process.pid for process in multiprocessing.active_children()}
        if self._given_up.is_set():
            raise EngineDeadError("the start of the engine was given up")
        try:
            llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        except Exception as error:
            why = (
                f"within start_timeout_s={self._config.start_timeout_s:g}; give it more time"
                if self._timed_out
                else f"with {self._model}: {error}"
            )
            raise EngineDeadError(f"the vLLM engine did not start {why}{_log_tail(log)}") from error
        if log is not None:
            # When the engine dies each request raises, so that its traceback says nothing new.
            logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
        cores = self._processes()
        return Engine(llm, log, cores, _tree(cores))

    def _processes(self) -> list[BaseProcess]:
        """Returns the EngineCore processes that this start has spawned and that still run."""
        before = self._before
        if before is None:
            return []
        children = multiprocessing.active_children()
        return [p for p in children if p.pid not in before and p.name.startswith("EngineCore")]

    def _kill(self) -> None:
        cores = self._processes()
        for process in _tree(cores):
            process.kill()
        for core in cores:
            core.join(timeout=_STOP_S)


def _tree(cores: list[BaseProcess]) -> list[Any]:
    """Returns handles of EngineCore processes and all that they have started, EngineCores first."""
    import psutil

    found: list[Any] = []
    for core in cores:
        try:
            found.append(psutil.Process(core.pid))
            found += found[-1].children(recursive=True)
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
    return found


def _reason(error: Exception) -> str:
    """Returns an error's message without the wrapping that pydantic gives it."""
    if isinstance(error, ValidationError):
        return "; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())
    return str(error)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _log_tail(log: Path | None) -> str:
    """Returns what the engine's log says went wrong, as the end of an error message: its errors, else its last lines."""
    if log is None or not log.exists():
        return ""
    lines = [_LOG_PREFIX.sub("", line).rstrip() for line in log.read_text(errors="replace").splitlines()]
    errors = dict.fromkeys(line for line in lines if _ERROR_LINE.match(line))
    said = ([*errors] or [line for line in lines if line])[-_LOG_LINES:]
    return f"\nIts log, {log}, says:\n" + "\n".join(f"  {line}" for line in said) if said else ""
