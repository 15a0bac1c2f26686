"""Recorded agent runs under two stock middlewares: what each revision is called, and what of it is prefilled."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from agentcache.episodes import Renderer
from agentcache.errors import ConfigError
from agentcache.evaluation.cli import eval_app
from agentcache.evaluation.cli_replay import run_replay
from agentcache.evaluation.replay import RULES, Call, Rules, histories, replay_run, revise, summarise
from agentcache.recovery import get_policy

DATA = Path(__file__).parent / "data" / "tau_bench_3.json"
TEMPLATE = Path(__file__).parents[1] / "integrations" / "templates" / "qwen2_5.jinja"
WHEN = Rules(clear_trigger=2200, summary_trigger=3000)

# Read off the messages by hand, call by call from the second one on (2026-11-30): a = only new turns came; t = an old tool result was
# replaced by "[cleared]", and new turns came; s = old messages, or an older summary, were replaced by a summary, and new turns came.
BY_HAND = {
    ("0-0-0", "clearing"): "aaaaaaatatttat",
    ("0-0-0", "summarisation"): "aaaaaaaasaaaas",
    ("5-0-1", "clearing"): "aaaaaataatt",
    ("5-0-1", "summarisation"): "aaaaaaaaaas",
    ("25-0-2", "clearing"): "aaaaaaatattaat",
    ("25-0-2", "summarisation"): "aaaaaaaaasssas",
}
NAMES = {"a": "append", "t": "tool_result", "s": "summarisation"}


@pytest.fixture(scope="module")
def calls(smollm2_path: Path) -> dict[tuple[str, str], list[Call]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    tokenizer.chat_template = TEMPLATE.read_text()  # SmolLM2's own shows no tool calls
    renderer, policy = Renderer(tokenizer), get_policy("edit_local", {})

    def count(messages: Any) -> int:
        texts = [f"{m.text}{json.dumps(getattr(m, 'tool_calls', None) or '')}" for m in messages]
        return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    return {
        (run, rule): [*replay_run(run, [*revise(messages, rule, count, WHEN)], rule, renderer, policy)]
        for run, messages in histories(json.loads(DATA.read_text()))
        for rule in RULES
    }


@pytest.mark.parametrize(("run", "rule"), BY_HAND)
def test_revisions_are_classified_as_a_person_does(
    run: str, rule: str, calls: dict[tuple[str, str], list[Call]]
) -> None:
    assert [call.kind for call in calls[run, rule]] == ["first", *(NAMES[kind] for kind in BY_HAND[run, rule])]


def test_a_revision_has_a_name_of_its_own_just_when_a_middleware_acted(
    calls: dict[tuple[str, str], list[Call]],
) -> None:
    for call in chain.from_iterable(calls.values()):
        assert call.acted == (call.kind not in ("first", "append")), call


def test_each_token_is_cached_reused_or_computed(calls: dict[tuple[str, str], list[Call]]) -> None:
    for call in chain.from_iterable(calls.values()):
        assert call.cached + call.reused + call.computed == call.tokens and call.computed >= 1, call
        assert bool(call.reused) == call.acted, call  # what follows a revision is reused, and only that
        assert not call.acted or call.cached >= 1300, call  # the system prompt stays what it was


def test_a_summary_is_made_of_the_messages_words() -> None:
    ((_, messages), *_) = histories(json.loads(DATA.read_text()))
    text = summarise(messages[1:3])
    assert text.startswith("- human: Hi! I'm looking to book a flight") and "\n- ai: To assist you" in text


def test_an_unknown_rule_and_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="'forgetting' is not known; there are clearing, summarisation"):
        list(revise([], "forgetting", len, WHEN))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"row 0 is no run of tau-bench: it has question"):
        list(histories([{"question": "?"}]))


def test_a_policy_that_needs_an_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'attended' chooses by what only an engine measures"):
        run_replay(DATA, "smollm2", tmp_path / "r.json", None, rules=WHEN, policy="attended")  # type: ignore[arg-type]


def test_the_command_writes_sums_by_revision(smollm2_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "replay.json"
    given = ["replay", "--data", DATA, "--model", smollm2_path, "--template", TEMPLATE, "--out", out, "--quick"]
    done = CliRunner().invoke(eval_app, list(map(str, given)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert {cell["rule"] for cell in result["cells"]} == set(RULES)
    for cell in result["cells"]:
        assert cell["cached"] + cell["reused"] + cell["computed"] == cell["tokens"], cell
        assert (cell["saved_share"] > 0.3) == (cell["kind"] in ("tool_result", "summarisation")) or cell[
            "kind"
        ] == "all"
    assert result["provenance"]["data"][0]["count"] == 2
    assert "| clearing | tool_result |" in out.with_suffix(".md").read_text()
