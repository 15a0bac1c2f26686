"""What every process of the engine runs first, in place of the user's script.

A spawned process imports its parent's main module before anything else. The engine needs nothing of the user's script, and a
script without `if __name__ == "__main__":` would start engines without end, so `launch` names this module as the main one. It

- blocks SIGINT: Ctrl-C in a terminal shall reach only the caller, which aborts its request and keeps the engine;
- sends the process's output to the engine's log, where only errors shall stand;
- ends the process when its parent is gone: vLLM's EngineCore outlives a caller that was killed;
- looks for no garbage until the connector is there: importing vLLM makes a million objects that stay, and the collector would look at
  them again and again;
- lets the process end at once: the interpreter's own end would look at every object of vLLM and torch several times, for seconds.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from typing import Final

__all__ = ["LOG_VARIABLE", "collect_again"]

LOG_VARIABLE: Final = "AGENTCACHE_ENGINE_LOG"
_POLL_S: Final = 0.5
_GRACE_S: Final = 10.0


def collect_again() -> None:
    """Lets the garbage collector run again where this module, as the main one, has stopped it."""
    if getattr(sys.modules.get("__mp_main__"), "STOPPED_COLLECTOR", False):
        gc.enable()


def _log_errors(log: str) -> None:
    """Sends stdout and stderr, of C++ code too, to the end of a file, and silences what is no error."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    warnings.simplefilter("ignore")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__mp_main__":
    # Threads that are started later inherit the mask; so does the worker, which runs this module too.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if log := os.environ.get(LOG_VARIABLE):
        _log_errors(log)
    gc.disable()
    STOPPED_COLLECTOR = True
    atexit.register(gc.freeze)  # the first one is the last to run
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="agentcache-parent", daemon=True).start()
