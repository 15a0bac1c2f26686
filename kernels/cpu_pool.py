"""Threads that run compiled loops beside the caller's, as many as torch uses.

A pool of our own instead of numba's `prange`: two of numba's three layers abort when two threads start loops at once, all
of them keep hidden threads that inherit the affinity of whoever started the first loop (vLLM pins its CPU worker to one
core), and a parallel function takes several times as long to compile.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = ["Pool", "engine_cpus"]

_CHUNKS_PER_THREAD = 4  # so that a core that is busy elsewhere holds up a quarter of a share, not a whole one


def engine_cpus(threads: int) -> frozenset[int]:
    """Returns the cores that the engine computes on.

    The caller's own, when there are as many as threads. Else the caller is pinned, as vLLM pins its worker: then the cores
    that single threads of this process are pinned to, or where those are too few, all that any thread may use.

    Args:
        threads: How many the engine computes with.
    """
    own = frozenset(os.sched_getaffinity(0))
    if len(own) >= threads:
        return own
    masks = [own]
    for task in Path("/proc/self/task").iterdir():
        try:
            masks.append(frozenset(os.sched_getaffinity(int(task.name))))
        except ProcessLookupError:  # the thread ended meanwhile
            continue
    pinned = frozenset().union(*(mask for mask in masks if len(mask) == 1))
    return pinned if len(pinned) >= threads else frozenset().union(*masks)


class Pool:
    """Runs loops over items on the caller's thread and on helpers of its own.

    Args:
        cpus: Cores of the helpers; None takes the engine's, see `engine_cpus`.
    """

    def __init__(self, cpus: Iterable[int] | None = None) -> None:
        self._cpus = None if cpus is None else frozenset(cpus)
        self._helpers: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._helpers is None:
                cpus = self._cpus or engine_cpus(torch.get_num_threads())
                self._helpers = ThreadPoolExecutor(
                    max_workers=max(1, (os.cpu_count() or 2) - 1),
                    thread_name_prefix="agentcache-kernels",
                    initializer=os.sched_setaffinity,
                    initargs=(0, cpus),  # 0 is the thread that calls
                )
            return self._helpers

    def run(self, loop: Callable[[int, int], None], items: int) -> None:
        """Calls `loop(low, high)` until all items are done; returns then. Several threads may call at once.

        Args:
            loop: Works on the items `[low, high)`, without the interpreter lock.
            items: How many there are.
        """
        threads = min(torch.get_num_threads(), items)
        if threads <= 1:
            loop(0, items)
            return
        chunks = min(items, _CHUNKS_PER_THREAD * threads)
        turn = itertools.count()

        def work() -> None:
            while (chunk := next(turn)) < chunks:
                loop(chunk * items // chunks, (chunk + 1) * items // chunks)

        helpers = [self._executor().submit(work) for _ in range(threads - 1)]
        work()
        for helper in helpers:
            helper.result()
