"""The parts of the benches that need no engine."""

import pytest

from agentcache.bench_resume import NEW_SPAN, OLD_SPAN, make_edit, percentiles, sample_ids
from agentcache.demo import script
from agentcache.episodes import diff_tokens
from agentcache.errors import ConfigError
from agentcache.samples import load_hotpot_sample


def test_the_edit_replaces_one_span_by_a_longer_one():
    edit = make_edit(list(range(1000)), 600, 0.3)
    assert edit.at == 180
    assert len(edit.old) == 600
    assert len(edit.new) == 600 + NEW_SPAN - OLD_SPAN
    diff = diff_tokens(edit.old, edit.new)
    assert diff.prefix == edit.at
    assert [run.new_start for run in diff.suffix] == [edit.at + NEW_SPAN]
    assert diff.suffix[0].shift == NEW_SPAN - OLD_SPAN


def test_a_context_beyond_the_text_is_refused():
    with pytest.raises(ConfigError, match="1000 tokens"):
        make_edit(list(range(1000)), 990, 0.3)


def test_the_sample_holds_the_default_context():
    words = sample_ids(str.split)
    assert len(words) > 4096


def test_percentiles():
    assert percentiles([1, 2, 3, 4, 5, 6]) == {"p20": 2.0, "p50": 3.5, "p80": 5.0}


def test_the_demo_edits_one_result_and_then_shortens():
    first, second, third, fourth = (turn.messages for turn in script(load_hotpot_sample()))
    assert second[: len(first)] == first
    changed = [(a, b) for a, b in zip(second, third, strict=True) if a != b]
    assert len(changed) == 1
    assert changed[0][0]["role"] == "tool"
    assert len(fourth) < len(third)
    assert fourth[-1] == third[-1]
