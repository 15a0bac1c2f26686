"""Each example runs on a short setting and prints its table, on an engine that runs; the quickstart's is in test_readme."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from agentcache import AgentCache
from agentcache.integrations.langchain import ChatAgentCache

EXAMPLES = Path(__file__).parents[2] / "examples"

SHORT = {
    "compare_policies": ("--documents", "2", "--policies", "prefix_cache,edit_local,attended"),
    "langgraph_agent": ("--documents", "4", "--clear-at", "1000", "--summarise-at", "2200"),
    "long_pause": ("--documents", "2"),
    "stategraph_research": ("--documents", "5", "--rounds", "2"),
    "amem_chat": ("--questions", "2", "--tokens", "8"),
    "licomemory_chat": ("--questions", "2", "--tokens", "8"),
}
SHOWN = {
    "compare_policies": r"edit_local +\d+ +40 +\d+ ms .* [=≠]",
    "langgraph_agent": r"(?s)reading +tool_result +\d+ .*reading +summarisation +\d+ ",
    "long_pause": r"review +other +\d+ .* \d+ \(\d+%\)",
    "stategraph_research": r"research +memory +\d+ .* \d+ \(\d+%\)",
    "amem_chat": r"amem\S* +\w+ +\d+ .* \d+ \(\d+%\)",
    "licomemory_chat": r"lico\S* +\w+ +\d+ .* \d+ \(\d+%\)",
}


STEPS = {"long_pause": (("--step", "begin"), ("--step", "end"))}
"""What it runs in processes of its own, each with an engine; the slow tier and `tests/engine/test_two_processes.py` go from one to the next."""


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHORT, "quickstart"}


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *options]


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.engine
@pytest.mark.parametrize("name", SHORT)
def test_an_example_shows_what_its_resumes_saved(
    name: str, cache: AgentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example, began = imported(name), []

    def lend(*_: object, **settings: object) -> object:
        began.append(settings)
        return nullcontext(cache)

    def chat(*, model: str, max_tokens: int, max_model_len: int) -> ChatAgentCache:
        began.append({"model": model, "max_model_len": max_model_len})
        return ChatAgentCache(cache=cache, max_tokens=max_tokens)

    if hasattr(example, "AgentCache"):
        monkeypatch.setattr(example, "AgentCache", lend)
    else:
        monkeypatch.setattr(example, "ChatAgentCache", chat)
    parts = STEPS.get(name, ((),))
    for part in parts:
        here = () if not part else ("--folder", str(tmp_path), *part)
        monkeypatch.setattr(sys, "argv", command(name, *SHORT[name], *here)[1:])
        example.main()
    shown = capsys.readouterr().out
    assert len(began) == len(parts) and re.search(SHOWN[name], shown), shown


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
@pytest.mark.usefixtures("smollm2_path")
def test_an_example_runs_as_a_reader_runs_it(name: str, tmp_path: Path) -> None:
    shown = run(command(name), tmp_path)
    assert re.search(SHOWN[name], shown), shown


def run(words: Sequence[str], folder: Path) -> str:
    """Returns what a command prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=540, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout
