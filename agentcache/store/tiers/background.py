"""One thread that does queued jobs in order, off whatever path its owner is on."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Background"]

logger = logging.getLogger(__name__)

_NICE = 10  # about a tenth of a core that others want


class Background:
    """A bounded queue and its thread.

    The thread may run on every core, whatever its parent is pinned to: vLLM's CPU worker sits on one core, which a new
    thread would inherit.

    Args:
        name: Of the thread.
        most_jobs: How many may wait.
        yields: Whether the thread gives way to those that compute, which it would otherwise hold up: every thread of a parallel
            loop waits for its slowest.
    """

    def __init__(self, name: str, most_jobs: int, *, yields: bool = False) -> None:
        self._most = most_jobs
        self._yields = yields
        self._jobs: deque[Callable[[], None]] = deque()
        self._state = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Queues a job; returns False, and does not, when the queue is full or closed."""
        with self._state:
            if self._closed or len(self._jobs) >= self._most:
                return False
            self._jobs.append(job)
            self._state.notify_all()
            return True

    def flush(self) -> None:
        """Returns when every job that was queued is done; not to be called by a job."""
        with self._state:
            self._state.wait_for(lambda: not self._jobs and not self._busy)

    def close(self) -> None:
        """Does what is queued and ends the thread; a second call does nothing."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join()

    def _run(self) -> None:
        _use_every_core()
        if self._yields:
            _give_way()
        while True:
            with self._state:
                self._state.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                job()
            except Exception:  # one job's fault must not end those after it
                logger.exception("a background job of the checkpoint store failed")
            finally:
                with self._state:
                    self._busy = False
                    self._state.notify_all()


def _use_every_core() -> None:
    """Undoes an inherited pinning of the calling thread; the kernel keeps what the container allows."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))


def _give_way() -> None:
    """Lowers the calling thread's priority; only Linux has one a thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
