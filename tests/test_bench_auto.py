"""`bench auto` without an engine: its edits and its figures."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.bench_auto import TokenEdit, measured, short_suffix, summary, token_edits
from agentcache.errors import ConfigError
from agentcache.profiling.datasets import load_dataset

tokens = st.lists(st.integers(0, 3), max_size=30).map(tuple)


class Bytes:
    """A cache that renders messages as their bytes."""

    config = SimpleNamespace(max_model_len=3000)

    def render(self, messages):
        text = "\n".join(message["content"] for message in messages)
        return SimpleNamespace(token_ids=np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32))


@pytest.fixture(scope="module")
def tasks():
    return load_dataset().tasks


@given(old=tokens, new=tokens, keep=st.integers(0, 30))
def test_a_shortened_edit_keeps_its_edit_and_so_many_tokens_behind_it(old, new, keep):
    edit = TokenEdit("e", "replace", old, new)
    short = short_suffix(edit, keep)
    prefix, suffix = edit.prefix, edit.suffix
    assert old[:prefix] == new[:prefix]
    assert suffix == 0 or old[-suffix:] == new[-suffix:]
    assert short.suffix == min(keep, suffix) or (short.prefix, old) == (len(short.new), new)
    assert short.old == old[: len(old) - max(suffix - keep, 0)]
    assert short.new == new[: len(new) - max(suffix - keep, 0)]


def test_edits_are_seeded_and_of_many_lengths(tasks):
    made = token_edits(Bytes(), tasks, 60, seed=3)
    assert made == token_edits(Bytes(), tasks, 60, seed=3)
    assert made != token_edits(Bytes(), tasks, 60, seed=4)
    assert len({edit.kind for edit in made}) > 2
    assert all(edit.prefix < min(len(edit.old), len(edit.new)) <= 2998 for edit in made)
    assert sum(edit.suffix <= 256 for edit in made) >= 20
    assert max(edit.suffix for edit in made) > 1000


def test_more_edits_than_there_are_is_said():
    identical = load_dataset().tasks[:1]
    with pytest.raises(ConfigError, match="fewer than 500"):
        token_edits(SimpleNamespace(config=Bytes.config, render=lambda _: Bytes().render([])), identical, 500, seed=0)


def row(base: float, other: float, auto: float, chosen: str) -> dict[str, object]:
    times = {"prefix_cache": base, "edit_local": other, "auto": auto}
    return {"ttft_ms": times, "chosen": chosen, "suffix_tokens": 9}


def test_the_summary_is_that_of_the_claims():
    rows = [row(100, 20, 22, "edit_local")] * 3 + [row(10, 15, 10.1, "prefix_cache")] * 5
    found = summary(rows, "edit_local")
    assert found["edits"] == 8
    assert found["chosen_exact"] == 5
    assert found["median_ratio"] == pytest.approx(1.01)
    assert found["median_ratio_where_exact"] == pytest.approx(1.01)
    assert found["candidate_median_ratio_where_exact"] == pytest.approx(1.5)
    assert found["saved_ms"] == {"edit_local": 215.0, "auto": 233.5}
    assert found["saving_share"] == pytest.approx(233.5 / 215, abs=1e-4)


def test_a_candidate_that_saves_nothing_leaves_no_share():
    assert summary([row(10, 15, 10, "prefix_cache")], "edit_local")["saving_share"] is None


def test_a_file_is_gone_on_with_only_by_the_same_measurement(tmp_path):
    path, settings = tmp_path / "auto.json", {"model": "m", "seed": 1}
    assert measured(path, settings) == []
    path.write_text(json.dumps({**settings, "measured": [{"id": "a"}]}))
    assert measured(path, settings) == [{"id": "a"}]
    with pytest.raises(ConfigError, match="measured with another seed"):
        measured(path, settings | {"seed": 2})
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no file of bench auto"):
        measured(path, settings)
