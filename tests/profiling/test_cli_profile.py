from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcache import cli
from agentcache.profiling import runner
from agentcache.profiling.runner import ProfileRun
from tests.profiling.examples import example_profile

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `agentcache profile ARGS` in an empty folder; returns the exit status."""
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["agentcache", "profile", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ProfileRun]:
    """The runs that were asked for, in place of measuring."""
    asked: list[ProfileRun] = []

    def record(settings: ProfileRun, console: Any) -> None:
        asked.append(settings)

    monkeypatch.setattr(runner, "run", record)
    return asked


@pytest.mark.parametrize("command", [(), ("measure",)])
def test_a_model_is_measured_without_naming_the_command(
    run: Run, asked: list[ProfileRun], command: tuple[str, ...]
) -> None:
    assert (
        run(
            *command,
            "some/model",
            "--data",
            "a.jsonl",
            "--data",
            "sample",
            "--out",
            "p.json",
            "--pairs",
            "15",
            "--seed",
            "3",
        )
        == 0
    )
    assert asked == [ProfileRun("some/model", Path("p.json"), ("a.jsonl", "sample"), 15, 3)]


def test_the_sample_is_the_default(run: Run, asked: list[ProfileRun]) -> None:
    assert run("--pairs", "20", "smollm2") == 0
    assert asked == [ProfileRun("smollm2", Path("profile.json"), ("sample",), 20)]


def test_a_folder_that_is_missing_is_refused(
    run: Run, asked: list[ProfileRun], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("smollm2", "--out", "nowhere/p.json") == 2
    assert capsys.readouterr().err == "error: --out nowhere/p.json: there is no folder nowhere\n"
    assert asked == []


@pytest.mark.parametrize("command", ["", "measure", "plot"])
def test_help_explains_each_command(run: Run, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(*command.split(), "--help") == 0
    assert f"Usage: agentcache profile {command}".strip() in capsys.readouterr().out


def test_plot_prints_the_files_that_it_draws(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example_profile().save(tmp_path / "p.json")
    assert run("plot", "p.json", "--out", "drawn") == 0
    printed = capsys.readouterr().out.split()
    assert {Path(name).suffix for name in printed} == {".png", ".svg"}
    assert all((tmp_path / name).stat().st_size > 1000 for name in printed)


def test_plot_of_what_is_no_profile_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.json").write_text("{}")
    assert run("plot", "p.json") == 2
    assert "'p.json' is no profile" in capsys.readouterr().err


def test_data_that_cannot_be_read_is_known_before_the_engine_starts(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("smollm2", "--data", "missing.jsonl") == 2
    assert "data 'missing.jsonl' cannot be read" in capsys.readouterr().err
