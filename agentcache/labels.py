"""What became of each row of a prompt, as run-length text: `P*42 X*7 R*32 F*3192 N*1`. No torch, no vLLM.

A label is one word. A report that crosses process and language borders carries such a text: short, readable, and the same for
people, logs and pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from agentcache.recovery.base import RecoveryPlan
from agentcache.types import PromptDiff, Run, clip_runs, complement, merge_runs

__all__ = ["NOTHING", "Label", "count_labels", "format_labels", "label_plan", "overlay", "parse_labels"]

NOTHING = "-"
"""The label of rows that have none."""


class Label(NamedTuple):
    """Rows `[start, stop)` and what they are."""

    name: str
    start: int
    stop: int


def format_labels(labels: Iterable[tuple[str, int, int]], length: int) -> str:
    """Returns labels as text over rows `[0, length)`; neighbours of one name are joined, rows without a label get `-`.

    Args:
        labels: Disjoint, in any order; empty ones are left out.
        length: Rows in all.
    """
    out: list[tuple[str, int]] = []

    def put(name: str, rows: int) -> None:
        if out and out[-1][0] == name:
            out[-1] = name, out[-1][1] + rows
        elif rows:
            out.append((name, rows))

    at = 0
    for name, start, stop in sorted((each for each in labels if each[2] > each[1]), key=lambda each: each[1]):
        assert at <= start and stop <= length, f"{name} [{start}, {stop}) overlaps another one or {length} rows"
        put(NOTHING, start - at)
        put(name, stop - start)
        at = stop
    put(NOTHING, length - at)
    return " ".join(f"{name}*{rows}" for name, rows in out)


def parse_labels(text: str) -> Iterator[Label]:
    """Yields the labels of a text, rows without one among them.

    Raises:
        ValueError: It is no such text.
    """
    at = 0
    for word in text.split():
        name, star, rows = word.rpartition("*")
        if not star or not name or "*" in name or not rows.isdecimal():
            raise ValueError(f"{word!r} is no label of rows; one looks like F*32")
        yield Label(name, at, at := at + int(rows))


def count_labels(text: str) -> dict[str, int]:
    """Returns how many rows each label of a text has."""
    counts: dict[str, int] = {}
    for name, start, stop in parse_labels(text):
        counts[name] = counts.get(name, 0) + stop - start
    return counts


def overlay(text: str, name: str, runs: Iterable[tuple[int, int]]) -> str:
    """Returns a text in which rows of these runs have this label, whatever they were."""
    labels = [*parse_labels(text)]
    length = labels[-1].stop if labels else 0
    covered = [*clip_runs(merge_runs(runs), 0, length)]
    out = [Label(name, *run) for run in covered]
    waiting = iter(complement(covered, length))
    gap = next(waiting, None)
    for old, start, stop in labels:
        while gap is not None and gap.start < stop:
            out.append(Label(old, max(start, gap.start), min(stop, gap.stop)))
            if gap.stop > stop:
                break
            gap = next(waiting, None)
    return format_labels(out, length)


def label_plan(plan: RecoveryPlan, diff: PromptDiff) -> str:
    """Returns which rows of the prompt are P, X, R, F and N by a plan; the sums are the plan's counts.

    Args:
        plan: What is restored and recomputed.
        diff: What it was made from, to the parent and the sources.
    """
    restored = [Run(run.new_start, run.new_stop) for run in plan.restore]
    fresh = [*clip_runs(diff.fresh, 0, plan.load_end)]
    labels = [Label("P" if start < diff.prefix else "F", start, stop) for start, stop in restored]
    labels += [Label("X", *run) for run in fresh]
    labels += [Label("R", *run) for run in complement([*restored, *fresh], plan.load_end)]
    labels.append(Label("N", plan.load_end, diff.new_len))
    return format_labels(labels, diff.new_len)
