"""`agentcache bench prompt`: what it counts. How long it takes is for a quiet machine to say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentcache.bench_prompt import STAGES, bench_prompt
from agentcache.cli import app
from agentcache.errors import ConfigError
from tests.episodes.families import CHATML, SPECIALS, make_tokenizer


def test_the_overhead_is_the_stages_without_the_templates_own_time_and_each_call_is_the_revision_of_a_tool_result() -> (
    None
):
    tokenizer = make_tokenizer(CHATML, SPECIALS["chatml"], "<|im_end|>")
    found = bench_prompt(tokenizer, ["hello world, said the tool result"], messages=40, tokens=2_000, repeats=5)
    assert found["messages"] == 40 and found["repeats"] == 5
    assert found["tokens"] == pytest.approx(2_000, rel=0.3)
    assert found["kinds"] == ["tool_result"]
    assert set(found["stages"]) == set(STAGES)
    assert found["overhead_ms"] > max(found["stages"].values()) > 0 and found["template_ms"] > 0


@pytest.mark.parametrize(
    ("texts", "messages", "problem"), [([], 40, "no text"), (["hello"], 12, "messages=12 are too few")]
)
def test_what_cannot_be_measured_is_refused(texts: list[str], messages: int, problem: str) -> None:
    tokenizer = make_tokenizer(CHATML, SPECIALS["chatml"], "<|im_end|>")
    with pytest.raises(ConfigError, match=problem):
        bench_prompt(tokenizer, texts, messages=messages, tokens=2_000, repeats=5)


def test_the_command_prints_a_table_and_writes_what_it_measured(tmp_path: Path, smollm2_path: Path) -> None:
    out = tmp_path / "prompt.json"
    words = ["bench", "prompt", "--messages", "40", "--tokens", "2000", "--reps", "5", "--json", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert "the template's own time" in result.output
    assert found["model"] == "smollm2" and found["data"]["hash"] and found["hardware"]["cores"] and found["versions"]
