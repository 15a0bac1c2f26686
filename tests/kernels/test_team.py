"""Shared loops: every item once, on torch's own threads, from any number of callers, and no failure goes unseen."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numba import njit

from agentcache.kernels import Kernels, cpu_backend, cpu_team
from agentcache.kernels.cpu_team import share, team_address
from tests.kernels.cases import make_layout


@njit
def _count(low, high, marks, refused):
    for i in range(low, high):
        if i == refused:
            raise ValueError
        marks[i] += 1


@njit(nogil=True)
def count(team, threads, shares, items, *arguments):
    return share(team, threads, shares, items, _count, arguments)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("items", "shares"), [(0, 0), (1, 1), (7, 7), (100, 1), (100, 8), (101, 12)])
def test_every_item_is_done_once(threads, items, shares):
    marks = np.zeros(items, np.int64)
    assert count(team_address(), threads, shares, items, marks, -1)
    assert (marks == 1).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_loop_that_fails_is_reported_and_the_others_are_done(threads):
    marks = np.zeros(8, np.int64)
    assert not count(team_address(), threads, 8, 8, marks, 5)
    assert marks.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


def test_a_kernel_whose_loop_fails_raises(monkeypatch):
    kernels = Kernels(make_layout("cpu", 1, 32, 32, 4), layers=1, dtype=torch.bfloat16, implementation="numba")
    monkeypatch.setattr(cpu_backend, "residual", lambda *_: False)
    with pytest.raises(MemoryError, match="scratch"):
        kernels.value_residual([torch.zeros(4 * 2048, dtype=torch.bfloat16)], range(4), 0, 128)


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch has one thread")
def test_torchs_own_threads_are_used():
    torch.ones(1 << 22).add_(1)
    before = set(os.listdir("/proc/self/task"))
    for _ in range(3):
        assert count(team_address(), torch.get_num_threads(), 8, 100, np.zeros(100, np.int64), -1)
        torch.ones(1 << 22).add_(1)
    assert set(os.listdir("/proc/self/task")) <= before


def test_several_threads_may_share_at_once():
    def call(n):
        marks = np.zeros(100 + n, np.int64)
        return count(team_address(), 2, 8, 100 + n, marks, -1) and bool((marks == 1).all())

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, range(40)))


def test_a_process_without_openmp_is_refused(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    monkeypatch.setattr(cpu_backend, "team_address", cpu_team.team_address.__wrapped__)
    with pytest.raises(RuntimeError, match="OpenMP threads cannot be reached"):
        Kernels(make_layout("cpu", 1, 32, 32, 4), layers=1, dtype=torch.bfloat16, implementation="numba")
