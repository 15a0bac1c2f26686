"""Starts and stops vLLM for an `AgentCache`: environment, start-up checks, processes.

Two processes serve one cache: the caller, and vLLM's EngineCore with the scheduler and the one worker, which has the model. More
workers have a process each. All are spawned with `agentcache.engine.child` as their main module.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
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
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import psutil
from pydantic import ValidationError

from agentcache.config import CacheConfig
from agentcache.engine.arguments import IN_CORE, engine_args, import_vllm, is_quiet
from agentcache.engine.child import LOG_VARIABLE
from agentcache.engine.support import check_config
from agentcache.errors import ConfigError, EngineDeadError, RequestError, UnsupportedModelError

__all__ = ["Engine", "EngineStart"]

CHILD_MODULE: Final = "agentcache.engine.child"
_STOP_S: Final = 30.0
_LOG_LINES: Final = 8
_LOG_PREFIX: Final = re.compile(r"^\((?:EngineCore|Worker)\S* pid=\d+\) ERROR \S+ \S+ \[\S+\] ?")
_ERROR_LINE: Final = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
_CALL_POLL_S: Final = 0.5
_KILL_POLL_S: Final = 0.1
_start_lock = threading.Lock()


@contextlib.contextmanager
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


def _set_threads(vllm_config: Any) -> None:
    """Sets OpenMP's variables for a worker that runs in EngineCore; inside `_environment`, which takes them back.

    vLLM sets them for workers in processes of their own alone, and binds each thread to one core. Here all may use all of the
    worker's cores: whatever else EngineCore's main thread starts, grammars' compilers among it, would inherit its one core.
    """
    if vllm_config.parallel_config.distributed_executor_backend != IN_CORE:
        return
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    manager = OMPProcessManager(vllm_config)
    if manager.skip_setup:  # VLLM_CPU_OMP_THREADS_BIND=nobind
        return
    cores = [str(core) for core in manager.cpu_lists[0]]
    os.environ |= {
        "OMP_NUM_THREADS": str(len(cores)),
        "OMP_PLACES": f"{{{','.join(cores)}}}",
        "OMP_PROC_BIND": "true",
    }


@contextlib.contextmanager
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
        if self._stopped.is_set():
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        context, handler = self.llm.engine_core.resources.ctx, self.llm.output_handler
        loop = handler.get_loop() if handler is not None and not handler.get_loop().is_closed() else None
        if loop is not None:
            loop.call_soon_threadsafe(_end_requests, handler, self.llm.output_processor)
        self.llm.shutdown(timeout=_STOP_S)
        # vLLM leaves its ZeroMQ context open; its sockets are closed on the loop, so the context is too.
        loop.call_soon_threadsafe(context.destroy, 0) if loop else context.destroy(0)
        del self.llm  # its `__del__` fails when it runs as late as the interpreter's own end
        _, alive = psutil.wait_procs(self._tree, timeout=_STOP_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
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
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._timed_out = False
        # Children of this process before the start; None while nothing of ours can run.
        self._before: set[int | None] | None = None

    def run(self) -> Engine:
        """Returns the engine once it is ready.

        Raises:
            ConfigError: vLLM does not accept the settings.
            UnsupportedModelError: The model's KV cannot be recovered.
            EngineDeadError: The engine did not start; carries what its log says.
        """
        log = None
        if is_quiet():
            handle, name = tempfile.mkstemp(prefix="agentcache-engine-", suffix=".log")
            os.close(handle)
            log = Path(name)
        watcher = threading.Thread(target=self._watch, name="agentcache-start-watch", daemon=True)
        watcher.start()
        try:
            # Not where the engine is a local: libraries keep the tracebacks of imports that failed, and those their frames.
            import_vllm()
            return self._launch(log)
        except BaseException as error:
            self._kill()
            if log is not None and (not isinstance(error, EngineDeadError) or not log.stat().st_size):
                log.unlink()
            raise
        finally:
            self._ended.set()
            self._wake.set()
            watcher.join()
            self._before = None

    def give_up(self) -> None:
        """Makes `run` raise soon: what it has started is killed."""
        self._given_up.set()
        self._wake.set()

    def _watch(self) -> None:
        """Kills what was started when the start takes too long or is given up, also what starts meanwhile."""
        self._wake.wait(self._config.start_timeout_s)
        if self._ended.is_set():
            return
        self._timed_out = not self._given_up.is_set()
        self._given_up.set()
        while not self._ended.wait(_KILL_POLL_S):
            self._kill()

    def _launch(self, log: Path | None) -> Engine:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.async_llm import AsyncLLM

        # One start at a time: the environment and the main module belong to the whole process.
        with _start_lock, _environment(self._config, log), _child_main():
            try:
                vllm_config = engine_args(self._config, self._model).create_engine_config()
            except (ValueError, OSError, TypeError, NotImplementedError, VLLMClientError) as error:
                if isinstance(error, ConfigError):
                    raise
                reason = f"vLLM does not accept these settings for {self._model}: {_reason(error)}"
                raise ConfigError(reason) from error
            if reasons := check_config(vllm_config):
                raise UnsupportedModelError(self._model, reasons)
            self._before = {process.pid for process in multiprocessing.active_children()}
            try:
                if self._given_up.is_set():
                    raise RuntimeError("the start was given up")
                _set_threads(vllm_config)
                llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
            except Exception as error:
                _release(error)
                raise EngineDeadError(f"the vLLM engine did not start {self._why(error)}{_log_tail(log)}") from error
        if log is not None:
            # When the engine dies each request raises, so that its traceback says nothing new.
            logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
        cores = self._processes()
        return Engine(llm, log, cores, _tree(cores))

    def _why(self, error: Exception) -> str:
        if self._timed_out:
            return f"within start_timeout_s={self._config.start_timeout_s:g}; give it more time"
        return f"with {self._model}: {error}"

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
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                process.kill()
        for core in cores:
            core.join(timeout=_STOP_S)


def _tree(cores: list[BaseProcess]) -> list[Any]:
    """Returns handles of EngineCore processes and all that they have started, EngineCores first."""
    found: list[Any] = []
    for core in cores:
        try:
            found.append(psutil.Process(core.pid))
            found += found[-1].children(recursive=True)
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
    return found


def _release(error: Exception) -> None:
    """Frees what the frames of a failed start hold: vLLM leaves its ZeroMQ context open, and that one warns of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        traceback.clear_frames(error.__traceback__)
        gc.collect()


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
