"""What the profile's measurement says of a pair, against slow computations on whole prefills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.harness import NEW, OLD, Engine, edit, first_version, lossy, text

pytestmark = pytest.mark.engine

P, X, S = 100, 20, 190


def measured(engine: Engine, old: list[int] = OLD, new: list[int] = NEW, **wanted: Any) -> dict[str, Any]:
    """Measures a pair on the idle engine."""
    (found,) = engine.llm.collective_rpc("agentcache_profile", args=(old, new, wanted))
    engine.forget_local()
    return found


def slow_drift(engine: Engine, old: list[int], new: list[int], suffix: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `1 - cos` of values and of rotated keys of the last rows, `[L, S]`, from two whole prefills."""
    stale, exact = engine.prefill_rows(old), engine.prefill_rows(new)
    stale, exact = stale[:, :, -suffix:], exact[:, :, -suffix:]
    shift = len(new) - len(old)
    out = []
    for part in (1, 0):
        rows = np.zeros((len(exact), suffix))
        for layer in range(len(exact)):
            for i in range(suffix):
                a, b = stale[layer, part, i], exact[layer, part, i]
                if part == 0:
                    a = engine.runtime.rotation.rotate(a, shift)
                x, y = a.flatten().double().numpy(), b.flatten().double().numpy()
                rows[layer, i] = 1 - x @ y / (np.linalg.norm(x) * np.linalg.norm(y))
        out.append(rows)
    return out[0], out[1]


def test_drift_is_that_of_two_whole_prefills(engine: Engine) -> None:
    found = measured(engine)
    value, key = (rows[found["layers"]] for rows in slow_drift(engine, OLD, NEW, S))
    edges = [0, 32, 64, 128]  # and up to 190
    assert found["lengths"] == {"prefix": P, "old": 300, "new": 310, "suffix": S}
    assert found["curve"]["from"] == edges
    assert found["curve"]["tokens"] == [32, 32, 64, 62]
    for name, rows in (("value", value), ("key", key)):
        want = np.array([part.mean(axis=1) for part in np.split(rows, edges[1:], axis=1)])
        assert want[0, -1] > 0.05, "a tiny model whose rows do not drift proves nothing"
        np.testing.assert_allclose(found["curve"][name], want, rtol=1e-3, atol=1e-6)
    blocks = [np.median(part.mean(axis=1)) for part in np.split(value, range(32, S, 32), axis=1)]
    assert (found["last"]["prefix"], found["last"]["middle"], found["last"]["suffix"]) == (P, X, S)
    np.testing.assert_allclose(found["last"]["deviation"], blocks, rtol=1e-3, atol=1e-6)


def test_the_first_layer_does_not_drift(engine: Engine) -> None:
    found = measured(engine, OLD, [*text(40, seed=7), *OLD])
    assert max(layer[0] for layer in found["curve"]["value"]) < 1e-9, "values of layer 0 know no context"
    assert max(layer[0] for layer in found["curve"]["key"]) < 1e-6, "keys of layer 0 know their position alone"
    assert min(layer[-1] for layer in found["curve"]["value"]) > 1e-3


def test_the_last_run_of_several_edits_is_what_sizes_a_window(engine: Engine) -> None:
    new = edit(NEW, 200, 5, text(9, seed=8))
    last = measured(engine, OLD, new)["last"]
    assert (last["prefix"], last["middle"], last["suffix"]) == (200, 9, len(new) - 209)
    assert len(last["deviation"]) == -(-last["suffix"] // 32)


def test_exact_recoveries_have_the_exact_next_tokens(engine: Engine) -> None:
    exact, whole = measured(engine, arms=[("prefix_cache", {}), ("edit_local", {"k": S})], reply_tokens=3)["arms"]
    for arm in (exact, whole):
        assert arm["kl"] < 1e-6 and abs(arm["gap"]) < 1e-6 and arm["top1"] == 1
        assert arm["ratio"] == 1 and arm["reused"] == 0
    assert exact["computed"] == len(NEW) - P


def test_a_recovery_is_that_of_a_resume(engine: Engine) -> None:
    """The same policy through the whole engine, with the attention of a checkpoint: the same rows are repaired."""
    options = {"window": 32, "kappa": 0.2, "query": 16}
    (arm,) = measured(engine, arms=[("patchkv", options)])["arms"]
    engine.forget_local()
    first_version(engine, precision="mixed")
    engine.forget_local()
    resume = lossy("v2", policy="patchkv", options=options)
    got = engine.ask(NEW, resume, n=1)
    assert got.recovery is not None and got.recovery.reused_tokens == arm["reused"] > 0
    assert got.recovery.repair_tokens == arm["repaired"] > 32
    assert arm["ratio"] == pytest.approx(1 - arm["reused"] / S)


def test_recomputing_more_loses_less(engine: Engine) -> None:
    windows = (0, 64, 128, S)
    arms = measured(engine, arms=[("patchkv", {"window": w, "kappa": 0}) for w in windows], reply_tokens=3)["arms"]
    assert [arm["ratio"] for arm in arms] == sorted(arm["ratio"] for arm in arms)
    assert arms[0]["kl"] > arms[2]["kl"] > arms[3]["kl"]


def test_precision_costs_what_it_saves(engine: Engine) -> None:
    never, always = {"tau_low": 0.0, "tau_high": 0.0}, {"tau_low": 1.0, "tau_high": 1.0, "low_bit_residual": 1.0}
    wanted = [{"tag": "exact"}, {"tag": "k8v8"}, {"tag": "k8v4"}, never, always]
    exact, eight, four, high, low = measured(engine, precisions=wanted, reply_tokens=2)["precisions"]
    assert exact == {"tag": "exact", "bytes": 1.0, "kl": 0.0, "kl_first": 0.0, "top1": 1.0, "gap": 0.0}
    assert exact["bytes"] > eight["bytes"] > four["bytes"] > 0
    assert 0 < eight["kl"] < four["kl"]
    assert (high["bytes"], high["kl"]) == (1.0, 0.0)
    assert (low["bytes"], low["kl"]) == (four["bytes"], four["kl"])


def test_single_blocks_in_four_bits_ascend_in_risk(engine: Engine) -> None:
    found = measured(engine, blocks=4)
    blocks, stored = found["blocks"], found["stored"]
    assert [b["risk"] for b in blocks] == sorted(b["risk"] for b in blocks)
    assert len({b["start"] for b in blocks}) == 4
    for block in blocks:
        at = block["start"] // 32
        assert block["residual"] == stored["residual"][at]
        assert block["risk"] == pytest.approx((stored["risk_max"][at] + stored["risk_mean"][at]) / 2, rel=1e-5)
        assert block["kl"] > 0


def test_a_pair_without_anything_behind_the_edit_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="nothing of the old prompt is aligned behind the edit"):
        measured(engine, OLD, OLD[:200])


def test_a_pair_that_the_kv_cache_cannot_hold_is_refused(engine: Engine) -> None:
    old = text(2100, seed=3)
    with pytest.raises(ValueError, match="KV cache is too small to measure in"):
        measured(engine, old, edit(old, 10, 5, text(9, seed=4)))
