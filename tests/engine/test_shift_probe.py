"""The probes of drift and of the mean shift, against slow computations on whole prefills and against a real request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentcache.engine.drift_probe import measure_drift
from agentcache.engine.shift_probe import measure_shift
from agentcache.engine.wire import ResumeParams
from tests.engine.harness import NEW, OLD, Engine, edit, text

pytestmark = pytest.mark.engine

BLOCKS = 128  # of the engine's KV cache, see the harness
CHUNKS = [text(96, seed=21), text(64, seed=22), text(80, seed=23)]
PROMPT = [
    *text(20, seed=24),
    *CHUNKS[2],
    *text(3, seed=25),
    *CHUNKS[0],
    *text(3, seed=26),
    *CHUNKS[1],
    *text(12, seed=27),
]


def drift(engine: Engine, old: list[int] = OLD, new: list[int] = NEW) -> dict[str, Any]:
    found = measure_drift(engine.runtime, BLOCKS, old, new)
    engine.forget_local()
    return found


def shift(engine: Engine, **wanted: Any) -> dict[str, Any]:
    found = measure_shift(engine.runtime, BLOCKS, PROMPT, CHUNKS, **wanted)
    engine.forget_local()
    return found


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    x, y = a.flatten().double().numpy(), b.flatten().double().numpy()
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def test_drift_is_that_of_two_whole_prefills(engine: Engine) -> None:
    found = drift(engine)
    stale, exact = engine.prefill_rows(OLD)[:, :, -190:], engine.prefill_rows(NEW)[:, :, -190:]
    assert found["lengths"] == {"prefix": 100, "middle": 20, "suffix": 190}
    for layer in range(len(stale)):
        for at in (0, 1, 5):
            rows = range(32 * at, min(32 * at + 32, 190))
            value = np.mean([cosine(stale[layer, 1, i], exact[layer, 1, i]) for i in rows])
            turn = engine.runtime.rotation.rotate
            key = np.mean([cosine(turn(stale[layer, 0, i], 10), exact[layer, 0, i]) for i in rows])
            still = np.mean([cosine(stale[layer, 0, i], exact[layer, 0, i]) for i in rows])
            got = [found[kind][layer][at] for kind in ("value", "key", "key_in_place")]
            np.testing.assert_allclose(got, [value, key, still], atol=1e-4)
    assert found["value"][-1][0] < 0.99, "a tiny model whose rows do not drift proves nothing"
    assert found["key_in_place"][0][0] < 0.99


def test_the_first_layer_knows_no_context(engine: Engine) -> None:
    found = drift(engine, OLD, [*text(40, seed=7), *OLD])
    assert min(found["value"][0]) == 1 and min(found["key"][0]) > 1 - 1e-5
    assert len(found["value"][0]) == -(-len(OLD) // 32)


def test_only_the_last_run_of_several_edits_counts(engine: Engine) -> None:
    new = edit(NEW, 200, 5, text(9, seed=8))
    assert drift(engine, OLD, new)["lengths"] == {"prefix": 200, "middle": 9, "suffix": len(new) - 209}


def test_nothing_behind_the_edit_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="nothing of the old prompt is aligned"):
        drift(engine, OLD, OLD[:200])
    with pytest.raises(ValueError, match="nothing of the chunks stands in the prompt"):
        measure_shift(engine.runtime, BLOCKS, PROMPT, [text(50, seed=3)])


def test_the_shift_probe_reuses_every_chunk_and_knows_the_exact_rows(engine: Engine) -> None:
    found = shift(engine, options={"share": 0.1})
    reused = sum(map(len, CHUNKS))
    assert 0.1 * reused <= found["probes"] <= 0.2 * reused + 3
    assert found["probes"] + found["kept"] == reused
    for side in (found["key"], found["value"]):
        assert max(side["residual"][0], side["left"][0]) < 1e-6 * side["norm"][0], "layer 0 knows no context"
        assert side["residual"][-1] > 1e-3 * side["norm"][-1]
        for best, probes, residual in zip(
            side["without_common"], side["without_probes"], side["residual"], strict=True
        ):
            assert best <= residual * (1 + 1e-6), "a mean never makes the sum of squares larger"
            assert best <= probes * (1 + 1e-6), "and no other offset does better"


def test_the_shift_moves_rows_and_storing_in_few_bits_adds_error(engine: Engine) -> None:
    exact, coarse = shift(engine), shift(engine, tag="k8v4")
    assert exact["value"]["left"][1] != exact["value"]["residual"][1]
    assert coarse["value"]["residual"][0] > 1e-4 * coarse["value"]["norm"][0] > exact["value"]["residual"][0]


def test_the_probe_chooses_as_many_probes_as_a_request_does(engine: Engine) -> None:
    found = shift(engine, options={"share": 0.2})
    for number, ids in enumerate(CHUNKS):
        engine.ask(ids, ResumeParams(version=f"chunk {number}"), n=1)
    engine.drain()
    names = [f"chunk {number}" for number in range(len(CHUNKS))]
    resume = ResumeParams(version="ask", sources=names, policy="mean_shift", options={"share": 0.2}, save=False)
    got = engine.ask(PROMPT, resume, n=4).recovery
    assert got is not None and got.reason is None
    assert (got.repair_tokens, got.source_tokens) == (found["probes"], found["kept"])
