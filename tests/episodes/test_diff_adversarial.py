"""Repetitive and unrelated prompts: the work is counted, so a quadratic blow-up fails without a clock."""

import numpy as np
import pytest

from agentcache.episodes import diff as diff_module
from agentcache.episodes.diff import diff_tokens

LENGTH = 131_072
rng = np.random.default_rng(7)


def holes(base, count):
    out = base.copy()
    out[rng.choice(len(out), count, replace=False)] = 99
    return out


def framed(first, ids, last):
    return np.concatenate([[first], ids, [last]])


EQUAL = np.full(LENGTH, 7)
PERIOD = np.tile([1, 2], LENGTH // 2)
BOILERPLATE = np.tile(rng.integers(0, 50_000, 512), LENGTH // 512)
CASES = {
    "identical": (EQUAL, EQUAL),
    "equal": (framed(1, EQUAL, 2), framed(3, EQUAL[:-5000], 4)),
    "equal-holes": (framed(1, holes(EQUAL, 4000), 2), framed(3, holes(EQUAL, 4000), 4)),
    "period-2": (framed(5, PERIOD, 6), framed(7, PERIOD[:-999], 8)),
    "period-2-holes": (framed(5, holes(PERIOD, 300), 6), framed(7, holes(PERIOD, 300), 8)),
    "boilerplate": (BOILERPLATE, holes(BOILERPLATE, 50)),
    "two-letters": (rng.integers(0, 2, LENGTH), rng.integers(0, 2, LENGTH)),
    "unrelated": (rng.integers(0, 50_000, LENGTH), rng.integers(50_000, 99_000, LENGTH)),
    "reversed": (np.arange(LENGTH), np.arange(LENGTH)[::-1]),
}


@pytest.fixture
def work(monkeypatch):
    """Counts the token pairs that are compared and the grams that are sorted."""
    counts = {"pairs": 0, "grams": 0}
    usable, match = diff_module._Middle._usable, diff_module.match_grams

    def counted_usable(self, o, n, length):
        counts["pairs"] += length
        return usable(self, o, n, length)

    def counted_match(old, new, *, unique):
        counts["grams"] += len(old.starts) + len(new.starts)
        return match(old, new, unique=unique)

    monkeypatch.setattr(diff_module._Middle, "_usable", counted_usable)
    monkeypatch.setattr(diff_module, "match_grams", counted_match)
    return counts


@pytest.mark.parametrize("name", CASES)
def test_hard_prompts_are_diffed_rightly_in_linear_work(name, work):
    old, new = CASES[name]
    diff = diff_tokens(old, new)
    used = np.zeros(len(old), np.int8)
    for run in diff.aligned:
        assert (old[run.old_start : run.old_stop] == new[run.new_start : run.new_stop]).all()
        used[run.old_start : run.old_stop] += 1
    assert used.max(initial=0) <= 1
    assert work["pairs"] <= 16 * LENGTH
    assert work["grams"] <= 3 * diff_module._ROUNDS * 2 * LENGTH


@pytest.mark.parametrize(
    ("name", "least"),
    [("equal", 0.95), ("equal-holes", 0.75), ("period-2", 0.98), ("period-2-holes", 0.8), ("boilerplate", 0.97)],
)
def test_repeated_text_is_reused(name, least):
    old, new = CASES[name]
    diff = diff_tokens(old, new)
    assert sum(run.length for run in diff.aligned) >= least * len(new)


def test_a_repeated_tool_result_is_replaced_in_place():
    result, other, turns = (
        rng.integers(0, 50_000, 400),
        rng.integers(0, 50_000, 300),
        [rng.integers(0, 50_000, 50) for _ in range(6)],
    )
    old = np.concatenate([part for turn in turns for part in (turn, result)])
    new = np.concatenate([part for i, turn in enumerate(turns) for part in (turn, other if i == 2 else result)])
    diff = diff_tokens(old, new)
    assert diff.aligned == ((0, 0, 950), (1350, 1250, 1350))
