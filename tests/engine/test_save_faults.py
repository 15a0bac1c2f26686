"""Saves with mixed precision that go wrong: what cannot be measured is stored exactly, and all ranks keep in step."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

import torch

from agentcache.engine import runtime as runtime_module
from agentcache.engine.orders import SaveOrder, StepReport
from agentcache.engine.wire import ResumeParams
from agentcache.store.extents import NewObject
from tests.engine.harness import OLD, first_version
from tests.engine.saver_kit import MIXED, payloads, row_tags, spied

pytestmark = pytest.mark.engine


@pytest.fixture
def engine(start_engine, tiny):
    engine = start_engine(tiny("llama"), extra=MIXED)
    yield engine
    engine.drain()
    engine.check()


# -- what cannot be measured is stored exactly -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["queries", "attention_mass"])
def test_a_version_whose_attention_cannot_be_measured_is_exact(engine, caplog, method):
    with caplog.at_level(logging.ERROR), spied(engine, fail=method):
        first_version(engine)
    assert "it is stored exactly" in caplog.text
    version = engine.version("v1")
    assert version.attention is None
    assert {*row_tags(engine)} == {"exact"}
    assert engine.half.index.trusted_end(version) == len(version.token_ids)


def test_rows_whose_residual_cannot_be_measured_are_exact(engine, caplog):
    with caplog.at_level(logging.ERROR), spied(engine, fail="value_residual"):
        first_version(engine)
    assert "they are stored exactly" in caplog.text
    assert engine.version("v1").attention is not None
    assert {*row_tags(engine)} == {"exact"}
    assert all(payload.residual is None for _, payload in payloads(engine))


def test_attention_that_is_no_number_is_not_used(engine, caplog, monkeypatch):
    monkeypatch.setattr(engine.runtime, "attention_mass", lambda *args: torch.full((args[3],), torch.nan))
    first_version(engine)
    assert "not finite" in caplog.text
    assert engine.version("v1").attention is None
    assert {*row_tags(engine)} == {"exact"}


def test_an_engine_that_cannot_be_probed_stores_exactly(engine, monkeypatch):
    monkeypatch.setattr(engine.runtime, "probe_error", "made to fail")
    first_version(engine)
    assert {*row_tags(engine)} == {"exact"}


class Writing:
    """A segment forward that writes although it must not."""

    def __init__(self, segments):
        self._segments = segments

    def batches(self, segments):
        return self._segments.batches(segments)

    def forward(self, batch, *, write):
        return self._segments.forward(batch, moved=0 if write else 5)


def test_a_probe_that_writes_is_found_at_start_up(engine, monkeypatch, caplog):
    assert engine.runtime._probe_fault() is None
    monkeypatch.setattr(engine.runtime._probe, "segments", Writing(engine.runtime.segments))
    assert "wrote to the pages" in engine.runtime._probe_fault()
    assert "stay exact" in caplog.text


def test_a_save_that_cannot_be_gathered_fails_and_leaves_the_request_alone(engine, caplog):
    with spied(engine, fail="gather_runs"):
        answer = engine.ask(OLD, ResumeParams(version="v1"))
    assert answer.done and len(answer.tokens) == 8
    assert engine.version("v1") is None
    assert "could not save the KV" in caplog.text


def test_an_unknown_precision_refuses_the_save_and_says_what_there_is(engine, caplog):
    report = StepReport()
    engine.worker.saver.add([SaveOrder("lost", [1], [NewObject(1 << 40, 0, 5)], "k3v3", [1, 2, 3, 4, 5], 5)])
    engine.worker.saver.advance(engine.runtime, 0, report)
    assert report.unsaved == {"lost"} and not report.stored
    assert engine.worker.saver.take_finished() == {"lost"}
    assert "'k3v3'" in caplog.text and "mixed" in caplog.text


# -- several ranks -----------------------------------------------------------------------------------------------------------


class Group:
    """A tensor-parallel group of two whose other rank measures `scale` times what this one does; records each exchange."""

    world_size = 2

    def __init__(self, step, scale=3.0, broken=False):
        self.step, self.scale, self.broken = step, scale, broken
        self.exchanges: list[tuple[int, int]] = []

    def all_reduce(self, mine):
        self.exchanges.append((self.step(), len(mine)))
        other = mine * self.scale
        other[-1] = float(self.broken)
        return mine + other


def test_ranks_agree_on_the_mean_of_what_they_measured(engine, monkeypatch):
    group = Group(lambda: 0)
    monkeypatch.setattr(runtime_module, "get_tp_group", lambda: group)
    assert engine.runtime.mean_over_ranks(torch.tensor([1.0, 2.0]), 2).tolist() == [2.0, 4.0]
    assert engine.runtime.mean_over_ranks(None, 2) is None
    group.broken = True
    assert engine.runtime.mean_over_ranks(torch.tensor([1.0, 2.0]), 2) is None


@pytest.mark.parametrize("method", ["queries", "attention_mass", "value_residual"])
def test_a_rank_that_fails_meets_the_others_in_the_same_steps(engine, monkeypatch, method):
    engine.prefill_rows(OLD)
    table = engine._scratch(len(OLD)).tolist()

    def exchanges(name, fail):
        step = [0]
        group = Group(lambda: step[0], scale=0.0)
        saver, report = engine.worker.saver, StepReport()
        objects = [NewObject((1 << 40) + at + 1000 * len(name), at, at + 100) for at in (0, 100, 200)]
        with spied(engine, fail=fail), monkeypatch.context() as patch:
            patch.setattr(runtime_module, "get_tp_group", lambda: group)
            saver.add([SaveOrder(name, table, objects, "mixed", OLD, len(OLD))])
            while saver.pending:
                step[0] += 1
                saver.advance(engine.runtime, 1, report)
        assert report.saved == {name}
        saver.take_finished()
        for new in objects:
            engine.worker.store.drop(new.object_id)
        return group.exchanges

    assert exchanges("a", None) == exchanges("bb", method)
