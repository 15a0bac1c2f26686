"""Each example runs, on a setting that takes half a minute, and prints its table; the quickstart's is in test_readme."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from agentcache import AgentCache
from agentcache.integrations.langchain import ChatAgentCache

EXAMPLES = Path(__file__).parents[1] / "examples"

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
    "amem_chat": r"\(\d+ ?%\)",
    "licomemory_chat": r"\(\d+ ?%\)",
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHORT, "quickstart"}


ALONE = ("long_pause",)
"""Short runs in processes of their own; the others' share an engine, which takes longer to start than they run."""


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[AgentCache]:
    with AgentCache(smollm2_path, max_model_len=8192, connector={"attention": True}) as cache:
        yield cache


@pytest.mark.engine
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.usefixtures("smollm2_path")
def test_an_example_of_several_processes_shows_what_its_resumes_saved(name: str, tmp_path: Path) -> None:
    check(name, SHORT[name], tmp_path)


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted({*SHORT} - {*ALONE}))
def test_an_example_shows_what_its_resumes_saved(
    name: str, engine: AgentCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    began = []

    def lend(*_: object, **settings: object) -> object:
        began.append(settings)
        return nullcontext(engine)

    def chat(*, model: str, max_tokens: int, max_model_len: int) -> ChatAgentCache:
        began.append({"model": model, "max_model_len": max_model_len})
        return ChatAgentCache(cache=engine, max_tokens=max_tokens)

    if hasattr(example, "AgentCache"):
        monkeypatch.setattr(example, "AgentCache", lend)
    else:
        monkeypatch.setattr(example, "ChatAgentCache", chat)
    monkeypatch.setattr(sys, "argv", [str(path), *SHORT[name]])
    example.main()
    shown = capsys.readouterr().out
    assert len(began) == 1 and re.search(SHOWN[name], shown), shown


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
@pytest.mark.usefixtures("smollm2_path")
def test_an_example_runs_as_a_reader_runs_it(name: str, tmp_path: Path) -> None:
    check(name, (), tmp_path)


def check(name: str, options: Sequence[str], folder: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SHOWN[name], done.stdout), done.stdout
    assert "Traceback" not in done.stderr, done.stderr
