"""The thread of queued jobs."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from agentcache.store.tiers.background import Background


def test_jobs_run_in_order_and_a_failing_one_ends_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    queue = Background("test", 8)
    queue.submit(lambda: done.append(1))
    queue.submit(lambda: done.append(1 // 0))
    queue.submit(lambda: done.append(3))
    queue.flush()
    assert done == [1, 3]
    assert "ZeroDivisionError" in caplog.text
    queue.close()
    assert not queue.submit(lambda: done.append(4))


def test_a_full_queue_refuses() -> None:
    begun, go = threading.Event(), threading.Event()
    queue = Background("test", 2)
    queue.submit(lambda: (begun.set(), go.wait())[0])
    assert begun.wait(10)
    assert [queue.submit(lambda: None) for _ in range(4)] == [True, True, False, False]
    go.set()
    queue.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority a thread")
def test_a_thread_that_yields_has_a_lower_priority_and_no_other_has() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    found: dict[bool, int] = {}
    for yields in (False, True):
        queue = Background("test", 2, yields=yields)
        queue.submit(lambda yields=yields: found.__setitem__(yields, os.getpriority(os.PRIO_PROCESS, 0)))  # type: ignore[misc]
        queue.close()
    assert found == {False: mine, True: min(mine + 10, 19)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine
