from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from agentcache.evaluation.items import Row, item_key, rotated, run_items
from agentcache.work_file import WorkFile

ITEMS = [(item_key(item=number), number) for number in range(25)]


def square(number: int) -> Row:
    return {"square": number * number}


def run(
    path: Path, measure: Callable[[int], Row] = square, console: Console | None = None, **options: object
) -> list[Row]:
    return run_items(
        ITEMS, measure, work=WorkFile(path), label="squares", console=console or Console(file=io.StringIO()), **options
    )  # type: ignore[arg-type]


def test_each_item_is_measured_once_and_rows_keep_their_order(tmp_path: Path) -> None:
    seen: list[int] = []

    def measure(number: int) -> Row:
        seen.append(number)
        return square(number)

    first = run(tmp_path / "work.jsonl", measure)
    assert [row["square"] for row in first] == [number * number for number in range(25)]
    assert run(tmp_path / "work.jsonl", measure) == first
    assert seen == list(range(25))


def test_an_interrupt_keeps_what_was_measured_and_says_how_to_go_on(tmp_path: Path) -> None:
    seen: list[int] = []

    def interrupted(number: int) -> Row:
        if number == 7 and len(seen) == 7:
            raise KeyboardInterrupt
        seen.append(number)
        return square(number)

    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "work.jsonl", interrupted, Console(file=out, width=200))
    assert "interrupted after 7 of 25 items; the same command goes on there" in out.getvalue()
    seen.append(-1)  # it has been interrupted once
    assert run(tmp_path / "work.jsonl", interrupted) == run(tmp_path / "whole.jsonl")
    assert seen == [*range(7), -1, *range(7, 25)]


def test_enough_rows_end_the_loop_and_more_may_be_asked_for_later(tmp_path: Path) -> None:
    some = run(tmp_path / "work.jsonl", enough=lambda rows: len(rows) >= 4)
    more = run(tmp_path / "work.jsonl", enough=lambda rows: len(rows) >= 9)
    assert len(some) == 4 and len(more) == 9 and more[:4] == some


def test_without_a_terminal_progress_is_lines_with_what_is_left(tmp_path: Path) -> None:
    out = io.StringIO()
    run(tmp_path / "work.jsonl", console=Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert [line.split(" items")[0] for line in lines] == [f"squares: {at} of 25" for at in (1, 3, 10, 20)]
    assert all("min left at most" in line for line in lines)


def test_the_key_names_all_that_a_result_depends_on() -> None:
    assert item_key(model="m", item=1) == item_key(item=1, model="m")
    assert len({item_key(model="m", item=1), item_key(model="n", item=1), item_key(model="m", item=2)}) == 3


def test_rotation_lets_every_arm_begin_as_often() -> None:
    assert [rotated("abc", by)[0] for by in range(6)] == [*"abcabc"]
    assert rotated("abc", 1) == ["b", "c", "a"] and rotated([], 3) == []
