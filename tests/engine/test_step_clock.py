"""Steps are timed from their orders to their output."""

from __future__ import annotations

import pytest

from agentcache.engine.costs import CostModel, Limits, Sample, work_of
from agentcache.engine.step_clock import StepClock


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = 0.0
        self.costs = CostModel(Limits(1024, 1024, 16))
        self.costs.fit([Sample("forward", *work_of([(0, n)]), 0.01 + n * 1e-3) for n in (1, 100)])
        self.clock = StepClock(self.costs, lambda: self.at)

    def step(self, seconds: float, *arguments) -> None:
        self.clock.begin(*arguments)
        self.at += seconds
        self.clock.end()


@pytest.fixture
def hand() -> Hand:
    return Hand()


def test_a_step_tells_how_long_it_took(hand):
    for _ in range(40):
        hand.step(0.44, [(0, 100)])
        hand.at += 7
    assert hand.costs.steps.ratio == pytest.approx(4, rel=0.05)


def test_a_load_is_told_apart_from_the_rest_of_its_step(hand):
    for _ in range(40):
        hand.step(0.11 + 0.6, [(0, 100)], ("edit_local", 0.3))
    assert hand.costs.loads["edit_local"].ratio == pytest.approx(2, rel=0.05)
    assert hand.costs.steps.ratio == 1


def test_only_a_step_that_began_tells_anything(hand):
    hand.clock.end()
    hand.clock.begin([(0, 100)])
    hand.clock.skip()
    hand.at += 9
    hand.clock.end()
    assert hand.costs.steps.seen == 0


def test_a_step_without_an_output_is_forgotten_when_the_next_begins(hand):
    hand.clock.begin([(0, 100)])
    hand.at += 9
    hand.step(0.11, [(0, 100)])
    assert hand.costs.steps.ratio == pytest.approx(1, rel=0.1)
    assert hand.costs.steps.seen == 1
