"""Random traffic that draws on chunks, drops them and is preempted and aborted, on an engine with too little room."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from agentcache.types import AlignedRun
from tests.engine.chunk_kit import SYSTEM
from tests.engine.harness import Answer, assert_exact, text

pytestmark = pytest.mark.engine


def test_random_traffic_with_sources_leaves_everybody_elses_answers_exact(start_engine, tiny, reference):
    engine = start_engine(
        tiny("llama"), blocks=64, max_num_batched_tokens=192, extra={"host_bytes": 3 << 20, "save_tokens_per_step": 64}
    )
    rng = random.Random(5)
    units = [text(rng.randint(20, 110), seed=50 + i) for i in range(6)]
    exact: list[Answer] = []
    made: list[str] = []
    drew = 0
    for number in range(60):
        name = f"n{number}"
        order = rng.sample(range(6), rng.randint(1, 3))
        prompt = [*SYSTEM[: rng.randint(0, 40)]]
        for unit in order:
            prompt += [*units[unit][rng.randint(0, 3) :], *text(rng.randint(0, 6), seed=number)]
        kind = rng.choice(["chunk", "lossy", "lossy", "lossy", "exact", "plain"])
        if kind == "chunk":
            prompt = units[order[0]]
        names = [rng.choice(made) for _ in range(rng.randint(1, 4))] if made else []
        parent = rng.choice(made) if made and rng.random() < 0.4 else None
        policy = rng.choice(["direct_reuse", "edit_local", "epic"])
        given = {
            "chunk": ResumeParams(version=name),
            "lossy": ResumeParams(version=name, policy=policy, sources=names, parent=parent),
            "exact": ResumeParams(version=name, sources=names, parent=parent),
            "plain": None,
        }[kind]
        answer = engine.add(prompt, given, rng.choice([1, 6]))
        if kind in ("exact", "plain", "chunk"):
            exact.append(answer)
        if kind != "plain":
            made.append(name)
        if rng.random() < 0.2 and made:
            version = engine.version(rng.choice(made))
            if version is not None:
                engine.half.index.drop_version(version)
        if rng.random() < 0.1:
            engine.preempt()
        if rng.random() < 0.1 and not answer.done:
            engine.abort(answer)
        if rng.random() < 0.7:
            engine.run()
        if rng.random() < 0.2:
            engine.drain()
            engine.forget_local()
        drew += bool(answer.recovery and answer.recovery.source_tokens)
    engine.run()
    engine.drain()
    engine.check()
    assert drew > 5, "sources were drawn on"
    assert_exact(reference, *(answer for answer in exact if not answer.aborted))
    for version in [*engine.half.index._versions.values()]:
        assert engine.stored_error(version, version.exact_end) < 1e-3
    assert engine.half.index.load_plan(version, [AlignedRun(0, 0, len(version.token_ids))]) is not None
