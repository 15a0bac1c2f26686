"""The helper threads: as many as torch's, on the engine's cores, from any number of callers."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from agentcache.kernels.cpu_pool import Pool, engine_cpus

CORES = sorted(os.sched_getaffinity(0))
# vLLM replaces this function in every process that runs its CPU worker; test modules are imported before any does.
SET_THREADS = torch.set_num_threads


@pytest.fixture
def threads():
    """Restores torch's thread count."""
    before = torch.get_num_threads()
    yield SET_THREADS
    SET_THREADS(before)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 100])
def test_every_item_is_done_once(threads, count, items):
    threads(count)
    done, lock = [], threading.Lock()

    def loop(low, high):
        with lock:
            done.extend(range(low, high))

    Pool().run(loop, items)
    assert sorted(done) == list(range(items))


def test_an_error_in_a_helper_reaches_the_caller(threads):
    threads(2)

    def loop(low, high):
        if low:
            raise ZeroDivisionError(low)

    with pytest.raises(ZeroDivisionError):
        Pool().run(loop, 8)


def test_helpers_run_on_the_given_cores(threads):
    threads(2)
    caller, seen, both = threading.get_ident(), set(), threading.Barrier(2, timeout=10)

    def loop(low, high):
        both.wait()  # two items, so each thread has one
        if threading.get_ident() != caller:
            seen.add(frozenset(os.sched_getaffinity(0)))

    Pool(cpus=CORES[:1]).run(loop, 2)
    assert seen == {frozenset(CORES[:1])}


def test_an_unpinned_caller_keeps_its_cores():
    assert engine_cpus(1) == frozenset(CORES)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores to pin threads apart")
def test_a_pinned_caller_finds_the_cores_of_the_pinned_threads():
    ready, leave = threading.Barrier(3, timeout=10), threading.Event()

    def pinned(core):
        os.sched_setaffinity(0, {core})
        ready.wait()
        leave.wait(10)

    def ask():
        os.sched_setaffinity(0, {CORES[0]})
        ready.wait()
        return engine_cpus(2)

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(pinned, core) for core in CORES[:2]]
        try:
            assert pool.submit(ask).result(10) == frozenset(CORES[:2])
        finally:
            leave.set()
        for thread in waiting:
            thread.result(10)
