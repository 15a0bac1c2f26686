"""What is timed at start-up, and what that leaves behind."""

from __future__ import annotations

import pytest
import torch

from agentcache.config import ConnectorConfig
from agentcache.engine import timing
from agentcache.engine.costs import CostModel, Limits, Sample
from agentcache.engine.orders import StepReport
from agentcache.engine.timing import time_runtime
from agentcache.engine.worker_half import WorkerHalf
from tests.engine.harness import Engine


@pytest.mark.parametrize("precision", ["exact", "k8v8", "k8v4", "mixed", "int8"])
def test_every_precision_can_be_timed_and_fitted(engine: Engine, precision):
    samples = time_runtime(engine.runtime, precision)
    assert {sample.kind for sample in samples} == {"forward", "restore"}
    assert all(sample.seconds > 0 and sample.rows > 0 for sample in samples)
    costs = CostModel(Limits(1024, 1024, 16))
    costs.fit(samples)
    assert costs.ready
    assert costs.estimate_exact(500, 0) > 0
    assert costs.restore_s(300, 2) > 0


def test_pages_are_left_as_they_were(engine: Engine):
    engine.ask(list(range(100, 300)), n=1)
    before = [cache.clone() for cache in engine.runtime.caches]
    time_runtime(engine.runtime, "exact")
    assert all(torch.equal(*pair) for pair in zip(before, engine.runtime.caches, strict=True))


def test_without_time_the_least_is_timed(engine: Engine):
    samples = time_runtime(engine.runtime, "exact", budget_s=0.0)
    assert sum(sample.kind == "forward" for sample in samples) == timing._FIRST


def test_timing_keeps_to_what_the_engine_allows(engine: Engine):
    limit = engine.runtime.segments.vllm_config.model_config.max_model_len
    for rows, context in timing._forwards(engine.runtime):
        assert 0 < rows <= engine.runtime.segments.max_tokens
        assert context >= 0
        assert context + rows <= limit


def test_the_engine_tells_its_scheduler_in_its_first_step(engine: Engine):
    engine.ask([5, 6, 7], n=1)
    assert engine.half.costs.ready
    assert not engine.worker._report.timings


def test_the_slower_rank_counts():
    fast = StepReport(timings=[Sample("forward", 4, 10, 0.1), Sample("forward", 8, 36, 0.5)])
    slow = StepReport(timings=[Sample("forward", 4, 10, 0.2), Sample("forward", 8, 36, 0.3)])
    both = fast.aggregate(slow)
    assert isinstance(both, StepReport)
    assert [sample.seconds for sample in both.timings] == [0.2, 0.5]
    for pair in ((fast, StepReport()), (StepReport(), fast)):
        one = pair[0].aggregate(pair[1])
        assert isinstance(one, StepReport)
        assert one.timings == fast.timings


def test_a_half_that_is_told_so_times_nothing(engine: Engine):
    half = WorkerHalf(ConnectorConfig(time_at_start=False))
    half.attach(engine.runtime)
    assert half.take_report() is None


def test_an_engine_that_cannot_be_timed_works_all_the_same(engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog):
    def fail(*_: object) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr("agentcache.engine.worker_half.time_runtime", fail)
    half = WorkerHalf(ConnectorConfig())
    half.attach(engine.runtime)
    assert half.take_report() is None
    assert "policy auto stays exact" in caplog.text
