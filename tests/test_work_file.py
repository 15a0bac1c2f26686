from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.work_file import WorkFile, digest_key


def test_a_work_file_keeps_what_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    assert WorkFile(path).get("a") is None and not path.exists()
    assert WorkFile(path).put("a", {"x": 0.1, "y": (1, 2)}, name="first") == {"x": 0.1, "y": [1, 2]}
    again = WorkFile(path)
    assert again.get("a") == {"x": 0.1, "y": [1, 2]} and again.get("b") is None


@pytest.mark.parametrize(("cut", "kept"), [(0, ["a"]), (1, ["a"]), (20, ["a"]), (-1, ["a", "b"])])
def test_a_line_that_was_cut_off_is_forgotten_and_ends_before_the_next(
    tmp_path: Path, cut: int, kept: list[str]
) -> None:
    path = tmp_path / "work.jsonl"
    work = WorkFile(path)
    for key in "ab":
        work.put(key, {"key": key})
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:cut])
    torn = WorkFile(path)
    assert [key for key in "ab" if torn.get(key)] == kept
    torn.put("c", {"key": "c"})
    whole = WorkFile(path)
    assert [key for key in "abc" if whole.get(key)] == [*kept, "c"]


def test_a_key_follows_from_the_values_alone() -> None:
    assert digest_key({"a": 1, "b": [2, 3]}) == digest_key({"b": [2, 3], "a": 1})
    assert len({digest_key({"a": 1}), digest_key({"a": 2}), digest_key({"b": 1}), digest_key({"a": "1"})}) == 4
