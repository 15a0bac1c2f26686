from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from agentcache.profiling.assemble import (
    BLOCKS,
    BLOCKS_IN_FOUR_BITS,
    KAPPAS,
    TAU_SHARES,
    Trained,
    assemble,
    calibration_wanted,
    train,
    train_wanted,
)
from agentcache.profiling.fit import boundary
from agentcache.profiling.measure import Pair, Wanted, training_pair
from tests.profiling.fake_engine import LAYERS, FakeEngine

Measured = list[tuple[Pair, dict[str, Any]]]


def pair(seed: int, dataset: str) -> Pair:
    rng = np.random.default_rng(seed)
    before, gone, come, behind = (rng.integers(0, 50_000, n).tolist() for n in (200, 20, 60, 400 + 40 * seed))
    return Pair(f"{dataset}/{seed}", dataset, f"task {seed}", [*before, *gone, *behind], [*before, *come, *behind])


def measure(pairs: list[Pair], wanted: Wanted) -> Measured:
    return [(each, FakeEngine().profile_pair(each.old, each.new, **wanted.options())) for each in pairs]


@pytest.fixture(scope="module")
def training() -> Measured:
    return measure([pair(seed, "train") for seed in range(12)], train_wanted())


@pytest.fixture(scope="module")
def trained(training: Measured) -> Trained:
    return train(training)


@pytest.fixture
def calibration(trained: Trained) -> Measured:
    pairs = [pair(seed, "ab"[seed % 2]) for seed in range(20, 26)]
    return copy.deepcopy(measure(pairs, calibration_wanted(trained)))


def arms_of(measured: Measured, model: str) -> list[dict[str, Any]]:
    return [arm for _, found in measured for arm in found["arms"] if arm["options"]["length_model"] == model]


def test_a_length_model_is_fitted_for_each_share_of_the_first_blocks_drift(
    training: Measured, trained: Trained
) -> None:
    first = np.median([found["last"]["deviation"][0] for _, found in training])
    assert [fit.tau_v for fit in trained.fits] == pytest.approx([share * first for share in TAU_SHARES], rel=0.05)
    assert all(fit.layers == tuple(LAYERS) and fit.pairs == len(training) for fit in trained.fits)


def test_every_kappa_and_block_is_tried_with_every_length_model(trained: Trained) -> None:
    wanted = calibration_wanted(trained)
    tried = {(o["length_model"], o["kappa"], o["block"]) for name, o in wanted.arms if name == "patchkv"}
    assert len(tried) == len(wanted.arms) == len(TAU_SHARES) * len(KAPPAS) * len(BLOCKS)
    assert wanted.precisions[0] == {"tag": "k8v8"} and len(wanted.precisions) == 1 + len(trained.precisions)


def test_quality_is_what_the_exact_tokens_keep_by_data_set(
    training: Measured, trained: Trained, calibration: Measured
) -> None:
    parts = assemble(training, calibration, trained)
    model = parts["length"].model.to_text()
    for candidate in parts["candidates"]:
        arms = {name: [] for name in "ab"}
        for each, found in calibration:
            arms[each.dataset] += [
                arm
                for arm in found["arms"]
                if arm["options"] == {"length_model": model, "kappa": candidate.kappa, "block": candidate.block}
            ]
        every = [arm for of in arms.values() for arm in of]
        assert len(every) == len(calibration)
        for name, of in arms.items():
            kl = sum(arm["kl"] for arm in of) / len(of)
            assert candidate.quality[name] == pytest.approx(100 * math.exp(-kl), abs=1e-3)
        assert candidate.computed_tokens == pytest.approx(np.mean([arm["computed"] for arm in every]), abs=0.01)
        assert candidate.recompute_ratio == pytest.approx(np.mean([arm["ratio"] for arm in every]), abs=1e-6)


@pytest.mark.parametrize(("kl_of_short", "chosen"), [(0.0, 1), (0.002, 1), (0.01, 0)])
def test_tau_v_is_the_cheapest_that_loses_no_data_set(
    training: Measured, trained: Trained, calibration: Measured, kl_of_short: float, chosen: int
) -> None:
    """The second share has the shorter windows; it costs data set `b` so much quality, where 0.0025 are allowed."""
    long, short = (fit.model.to_text() for fit in trained.fits)
    assert long != short
    for arm in arms_of(calibration, long):
        arm |= {"kl": 0.0, "computed": 200}
    for arm in arms_of(calibration, short):
        arm |= {"kl": 0.0, "computed": 100}
    for each, found in calibration:
        for arm in found["arms"] if each.dataset == "b" else ():
            if arm["options"]["length_model"] == short:
                arm["kl"] = kl_of_short
    assert assemble(training, calibration, trained)["length"].tau_v == trained.fits[chosen].tau_v


@pytest.mark.parametrize(("kl_of_least", "chosen"), [(0.001, KAPPAS[1]), (0.003, KAPPAS[1]), (0.01, KAPPAS[2])])
def test_kappa_is_the_cheapest_above_0_that_loses_no_data_set(
    training: Measured, trained: Trained, calibration: Measured, kl_of_least: float, chosen: float
) -> None:
    for _, found in calibration:
        for arm in found["arms"]:
            options = arm["options"]
            arm["kl"] = kl_of_least if options["kappa"] == KAPPAS[1] else 0.001
            arm["computed"] = 1000 * options["kappa"] + options["block"]
    parts = assemble(training, calibration, trained)
    assert (parts["kappa"], parts["block"]) == (chosen, BLOCKS[0])


@pytest.mark.parametrize(("first", "best"), [(0.55, 4), (0.51, 3)])
def test_precision_takes_the_fewest_bytes_within_the_tolerance(
    training: Measured, trained: Trained, calibration: Measured, first: float, best: int
) -> None:
    """0.25 points are 0.0025 nats; the last ones lose more."""
    for _, found in calibration:
        for at, how in enumerate(found["precisions"]):
            how |= {"kl": 0.002 if at <= best else 0.003, "bytes": first - at / 100}
    chosen = assemble(training, calibration, trained)["precision"]
    want = trained.precisions[best - 1]
    assert (chosen.tau_low, chosen.tau_high) == (want["tau_low"], want["tau_high"])
    assert (
        chosen.low_bit_residual
        == want["low_bit_residual"]
        >= max(residual for _, found in training for residual in found["stored"]["residual"])
    )
    assert len(chosen.candidates) == len(trained.precisions)


def test_precision_is_never_larger_than_eight_bits(training: Measured, trained: Trained, calibration: Measured) -> None:
    for _, found in calibration:
        for at, how in enumerate(found["precisions"]):
            how |= {"kl": 0.001 if at == 1 else 0.004, "bytes": {0: 0.5, 1: 0.6}.get(at, 0.45)}
    chosen = assemble(training, calibration, trained)["precision"]
    assert (chosen.tau_low, chosen.tau_high) != (trained.precisions[0]["tau_low"], trained.precisions[0]["tau_high"])


def test_coverage_is_of_the_calibration_edits(training: Measured, trained: Trained, calibration: Measured) -> None:
    length = assemble(training, calibration, trained)["length"]
    edits = [training_pair(found) for _, found in calibration]
    within = [
        int(length.model.windows(e.prefix, e.middle, e.suffix)) >= boundary(e, tau_v=length.tau_v, gamma=length.gamma)
        for e in edits
    ]
    assert length.coverage == pytest.approx(sum(within) / len(within))


def test_the_example_shows_the_longest_edit_and_what_was_taken(
    training: Measured, trained: Trained, calibration: Measured
) -> None:
    parts = assemble(training, calibration, trained)
    example, (_, found) = parts["attention"], max(calibration, key=lambda each: len(each[0].new))
    assert example.edit == (200, 260)
    assert len(example.attention) == -(-found["lengths"]["new"] // example.block)
    assert max(example.attention) == pytest.approx(max(found["placed"]["attention"]))
    assert not set(example.dirty) & set(example.nonlocal_blocks)
    assert min(example.dirty) == 260 // example.block


def test_single_blocks_come_from_the_training_edits(
    training: Measured, trained: Trained, calibration: Measured
) -> None:
    shown = assemble(training, calibration, trained)["sensitivity"]
    assert len(shown) == len(training) * BLOCKS_IN_FOUR_BITS
    assert (shown[1].start, shown[1].risk, shown[1].kl) == (32, 0.01, 0.001)
