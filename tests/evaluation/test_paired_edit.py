"""The loop of the paired-edit benchmark, on an engine that is a table of numbers."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agentcache.errors import AgentCacheError
from agentcache.evaluation import paired_edit
from agentcache.evaluation.paired_bench import coarse_kl
from agentcache.evaluation.paired_edit import PairedRun, run
from agentcache.profiling.derived import ChatFrame
from agentcache.profiling.model import ModelFingerprint
from agentcache.quality import kl_divergence
from agentcache.reply import RecoveryReport, Reply
from tests.evaluation.words import Words

FRAME = ChatFrame("<user> ", " <assistant> ")
MODEL = ModelFingerprint(
    name="fake", architecture="FakeForCausalLM", layers=2, kv_heads=1, head_dim=8, dtype="float32", hash="ef" * 16
)
RECOVERS = {"prefix_cache": 1.0, "edit_local": 0.9, "attended": 0.8, "direct_reuse": 0.0, "random": 0.1}
"""Margin recovery of each policy."""


class FakeCache:
    """An engine that answers an item rightly unless its draw is odd, and as each policy recovers."""

    def __init__(self, words: Words) -> None:
        self.tokenizer = words
        self.asked: list[str] = []
        self.reason: str | None = None
        self.items: dict[tuple[int, ...], tuple[Any, bool]] = {}

    def know(self, item: Any) -> None:
        self.items[tuple(item.old)] = item, False
        self.items[tuple(item.new)] = item, True

    def stats(self) -> dict[str, Any]:
        return {"engine": {"dtype": "float32"}}

    def reset_prefix_cache(self) -> bool:
        return True

    def flush(self) -> bool:
        return True

    def episode(self, _name: str) -> FakeCache:
        return self

    def drop(self) -> None: ...

    def generate(self, ids: list[int], *, logprobs: int | None = None, **options: Any) -> Reply:
        policy = options.get("policy")
        if tuple(ids) not in self.items:  # the parent, or the rows before the edit
            return reply(ids, None, 1.0, 0)
        item, is_new = self.items[tuple(ids)]
        share = RECOVERS[policy] if policy else float(is_new)
        answers = -6.0 + 12.0 * share if item.draw % 2 == 0 else -6.0
        self.asked.append(f"{policy or ('oracle' if is_new else 'stale')} #{item.draw}")
        noise = np.random.default_rng(zlib.crc32(repr((item.draw, policy)).encode()))
        logits = np.zeros(len(self.tokenizer.ids)) + noise.normal(0, 0.01, len(self.tokenizer.ids))
        logits[item.new_answer] = 10.0 + answers / 2
        logits[item.old_answer] = 10.0 - answers / 2
        given = logits - np.log(np.exp(logits).sum())
        watched = options.get("extra", {}).get("logprob_token_ids", range(len(given)))
        first = item.new_answer if answers > 0 else item.old_answer
        assert logprobs in (-1, len(watched))
        return reply(
            ids,
            {int(t): float(given[t]) for t in watched},
            50.0 if policy == "prefix_cache" else 10.0,
            first,
            policy,
            self.reason,
        )


def reply(
    ids: Sequence[int], given: Any, ttft_ms: float, first: int, policy: str | None = None, reason: str | None = None
) -> Reply:
    recovery = None
    if policy is not None:
        recovery = RecoveryReport(
            policy=policy, reason=reason, suffix_tokens=400, repair_tokens=32, recompute_ratio=0.08
        )
    return Reply(
        text="",
        token_ids=[first],
        finish_reason="length",
        prompt_tokens=len(ids),
        cached_tokens=0,
        ttft_ms=ttft_ms,
        version="v",
        recovery=recovery,
        logprobs=None if given is None else [given],
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCache:
    words = Words()
    cache = FakeCache(words)
    draw = paired_edit.draw

    def drawn(*args: Any, **kwargs: Any) -> Any:
        items = draw(*args, **kwargs)
        for item in items:
            cache.know(item)
        return items

    @contextmanager
    def engine(*_: Any) -> Iterator[FakeCache]:
        yield cache

    monkeypatch.setattr(paired_edit, "draw", drawn)
    monkeypatch.setattr(paired_edit, "_engine", engine)
    monkeypatch.setattr(paired_edit, "_tokenizer", lambda _: (words.encode, FRAME))
    monkeypatch.setattr(paired_edit, "fingerprint", lambda _: (Path("fake"), MODEL))
    return cache


@pytest.fixture
def settings(tmp_path: Path) -> PairedRun:
    return PairedRun(
        model="fake",
        out=tmp_path / "paired.json",
        conditions=("direct", "derived"),
        forms=("table",),
        distances=(0, 60),
        policies=("edit_local", "random", "attended", "direct_reuse"),
        budgets=(32,),
        transplants=(),
        items=4,
        draws=12,
        exact_every=1,
        tokens=None,
        data="sample",
        seed=3,
        reply="",
        profile=None,
        plots=False,
    )


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_cells_hold_what_each_policy_recovered_of_the_kept_items(fake: FakeCache, settings: PairedRun) -> None:
    result = run(settings, quiet())
    assert json.loads(settings.out.read_text()) == result
    found = {(c["condition"], c["distance"], c["policy"]): c for c in result["cells"]}
    assert len(found) == 3 * 5
    for (condition, _, policy), cell in found.items():
        assert cell["mr"] == pytest.approx(RECOVERS[policy], abs=0.01), (condition, policy)
        assert cell["flip"] == float(RECOVERS[policy] > 0.5) and cell["mr_ci"][0] <= cell["mr"] <= cell["mr_ci"][1]
        assert (
            cell["n_kept"] == 4 <= cell["n_drawn"] and cell["model"] == "fake" and cell["form"] in ("direct", "table")
        )
        assert cell["speedup"] == (1.0 if policy == "prefix_cache" else 5.0)
        assert (cell["wins"], cell["losses"]) == {"edit_local": (None, None), "prefix_cache": (4, 0)}.get(
            policy, (0, 4)
        )
    assert found["derived", 0, "prefix_cache"]["kl_recovery"] == pytest.approx(1, abs=0.01)
    assert found["derived", 0, "direct_reuse"]["kl_recovery"] == pytest.approx(0, abs=0.01)
    assert found["derived", 0, "edit_local"]["p_holm"] is None and found["derived", 0, "random"]["p_holm"] <= 1
    assert result["provenance"]["model"]["dtype"] == "float32"
    assert result["provenance"]["seeds"] == {"items": 3, "bootstrap": 0}
    text = settings.out.with_suffix(".md").read_text()
    assert "## fake, derived, d = 60, from 600 tokens" in text and "| edit_local | 32 | 4 | 0.90" in text


def test_a_kept_item_has_two_references_and_every_arm_once_another_the_first_alone_and_arms_take_turns(
    fake: FakeCache, settings: PairedRun
) -> None:
    run(replace(settings, conditions=("direct",)), quiet())
    by_item: dict[str, list[str]] = {}
    for word in fake.asked:
        what, number = word.split(" ")
        by_item.setdefault(number, []).append(what)
    kept, others = ([a for n, a in by_item.items() if int(n[1:]) % 2 == odd] for odd in (0, 1))
    assert others and all(arms == ["oracle"] for arms in others)
    assert [arms[:2] for arms in kept] == [["oracle", "stale"]] * len(kept)
    assert all(sorted(arms[2:]) == sorted(RECOVERS) for arms in kept)
    assert len({arms[2] for arms in kept}) > 1


def test_parts_of_a_run_are_merged_and_nothing_is_measured_twice(
    fake: FakeCache, settings: PairedRun, tmp_path: Path
) -> None:
    whole = run(replace(settings, out=tmp_path / "whole.json"), quiet())
    once = sorted(fake.asked)
    fake.asked.clear()
    run(replace(settings, conditions=("derived",), distances=(60,), policies=("edit_local", "random")), quiet())
    run(replace(settings, conditions=("direct",)), quiet())
    parts = run(settings, quiet())
    arms = [word for word in fake.asked if word.split(" ")[0] in RECOVERS]
    assert sorted(arms) == [word for word in once if word.split(" ")[0] in RECOVERS]
    assert parts["cells"] == whole["cells"] and parts["pairs"] == whole["pairs"]
    fake.asked.clear()
    assert run(settings, quiet())["cells"] == whole["cells"] and not fake.asked


def test_the_exact_policy_may_run_on_some_items_and_the_others_then_have_no_speedup_of_their_own(
    fake: FakeCache, settings: PairedRun
) -> None:
    some = replace(settings, conditions=("direct",), exact_every=4)
    cells = {cell["policy"]: cell for cell in run(some, quiet())["cells"]}
    assert 0 < cells["prefix_cache"]["n_kept"] < cells["edit_local"]["n_kept"] == 4
    assert cells["edit_local"]["speedup"] == 5.0
    fake.asked.clear()
    whole = {cell["policy"]: cell for cell in run(replace(some, exact_every=1), quiet())["cells"]}
    assert whole["prefix_cache"]["n_kept"] == 4 and whole["edit_local"] == cells["edit_local"]
    assert {word.split(" ")[0] for word in fake.asked} <= {"oracle", "stale", "prefix_cache"}


def test_measurements_of_another_seed_stay_out(fake: FakeCache, settings: PairedRun) -> None:
    run(settings, quiet())
    other = run(replace(settings, seed=4, conditions=("direct",)), quiet())
    assert {cell["condition"] for cell in other["cells"]} == {"direct"}


def test_too_few_kept_items_are_told(fake: FakeCache, settings: PairedRun) -> None:
    out = io.StringIO()
    run(replace(settings, conditions=("direct",), items=4, draws=3), Console(file=out, width=200))
    assert "direct d=0: the model answers" in out.getvalue() and "4 were asked for; see --draws" in out.getvalue()


def test_an_arm_that_recovered_less_than_it_asked_for_is_no_result(fake: FakeCache, settings: PairedRun) -> None:
    fake.reason = "the parent is gone"
    with pytest.raises(AgentCacheError, match="the parent is gone"):
        run(settings, quiet())


def test_plots_are_drawn(fake: FakeCache, settings: PairedRun) -> None:
    run(replace(settings, plots=True), quiet())
    assert {path.name for path in settings.out.parent.glob("*.svg")} == {"paired-budget.svg", "paired-distance.svg"}


def test_the_coarse_distance_is_a_lower_bound_of_the_whole_one_and_close_where_the_tokens_matter() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (2, 500))
    p, q = (dict(enumerate((row - np.log(np.exp(row).sum())).tolist())) for row in logits)
    best = sorted(p, key=p.__getitem__)[-128:]
    coarse = coarse_kl({t: p[t] for t in best}, {t: q[t] for t in best})
    assert 0.9 * kl_divergence(p, q) < coarse <= kl_divergence(p, q)
    assert coarse_kl(p, p) == 0
    with pytest.raises(ValueError, match="over 2 and 1 tokens"):
        coarse_kl({0: -1.0, 1: -2.0}, {0: -1.0})
