from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentcache import cli
from agentcache.errors import AgentCacheError

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `agentcache ARGS`; returns the exit status."""
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["agentcache", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code is None or isinstance(end.value.code, int)
        return end.value.code or 0

    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What the commands call, recorded in place of the modules that start an engine."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **named: Any) -> bool:
        calls.append((args, named))
        return True

    for module, function in (
        ("agentcache.demo", "run_demo"),
        ("agentcache.doctor", "run_doctor"),
        ("agentcache.bench_resume", "run"),
        ("agentcache.bench_auto", "run"),
        ("agentcache.bench_load", "run"),
        ("agentcache.bench_store", "run"),
    ):
        stand_in = ModuleType(module)
        setattr(stand_in, function, record)
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(sys.modules["agentcache.bench_store"], "StoreBench", lambda *args: args, raising=False)
    return calls


COMMANDS = [
    "",
    "demo",
    "doctor",
    "fetch",
    "version",
    "bench",
    "bench resume",
    "bench load",
    "bench store",
    "bench diff",
]
COMMANDS += ["store", "store ls", "store verify", "store gc"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_each_command(command: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    out = capsys.readouterr().out
    assert f"Usage: agentcache {command}".strip() in out


def test_version_names_agentcache_and_python(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == 0
    assert {"agentcache-kv", "python"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}


def test_an_error_is_one_message_without_traceback(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fetch", "./no[red]where") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: there is no model './no[red]where'")
    assert captured.err.count("\n") == 1


def test_debug_lets_the_error_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["agentcache", "--debug", "fetch", "./nowhere"])
    with pytest.raises(AgentCacheError, match="nowhere"):
        cli.main()


def test_fetch_prints_the_folder_alone(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").touch()
    assert run("fetch", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_demo_passes_its_options(run: Run, calls: list[Any]) -> None:
    assert run("demo", "--model", "some/model", "--policy", "direct_reuse", "--json", "out.json") == 0
    [(args, named)] = calls
    assert args[:2] == ("some/model", Path("out.json"))
    assert named == {"policy": "direct_reuse"}


def test_demo_takes_the_built_in_model_by_default(run: Run, calls: list[Any]) -> None:
    assert run("demo") == 0
    [(args, _)] = calls
    assert args[:2] == ("smollm2", None)


def test_doctor_passes_its_options(run: Run, calls: list[Any]) -> None:
    assert run("doctor", "some/model", "--gpu") == 0
    [(args, _)] = calls
    assert args[:2] == ("some/model", True)


def test_doctor_exits_with_1_when_something_does_not_work(
    run: Run, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["agentcache.doctor"], "run_doctor", lambda *_: False)
    assert run("doctor") == 1


def test_bench_resume_passes_its_options(run: Run, calls: list[Any]) -> None:
    options = "--model m --context 2048 --edit-at 0.5 --policies prefix_cache,edit_local --reps 9 --json out.json --profile p.json"
    assert run("bench", "resume", *options.split()) == 0
    [(_, named)] = calls
    del named["console"]
    assert named == {
        "model": "m",
        "context": 2048,
        "edit_at": 0.5,
        "policies": ["prefix_cache", "edit_local"],
        "reps": 9,
        "profile": Path("p.json"),
        "json_path": Path("out.json"),
    }


@pytest.mark.parametrize("options", ["--edit-at 1", "--edit-at 0", "--reps 0", "--context 12", "--policies ,"])
def test_bench_resume_refuses_what_it_cannot_measure(options: str, run: Run, calls: list[Any]) -> None:
    assert run("bench", "resume", *options.split()) == 2
    assert calls == []


def test_bench_auto_passes_its_options(run: Run, calls: list[Any]) -> None:
    options = "--model m --candidate attended:k=48 --margin 0.2 --edits 9 --reps 3 --data d --seed 4 --max-tokens 999 --json o.json"
    assert run("bench", "auto", *options.split(), "--resume") == 0
    [(_, named)] = calls
    del named["console"]
    assert named == {
        "model": "m",
        "candidate": "attended:k=48",
        "margin": 0.2,
        "edits": 9,
        "reps": 3,
        "data": "d",
        "seed": 4,
        "max_tokens": 999,
        "json_path": Path("o.json"),
        "resume": True,
    }


@pytest.mark.parametrize("options", ["--edits 0", "--reps 0", "--max-tokens 9", "--resume"])
def test_bench_auto_refuses_what_it_cannot_measure(options: str, run: Run, calls: list[Any]) -> None:
    assert run("bench", "auto", *options.split()) == 2
    assert calls == []


def test_bench_load_passes_its_options(run: Run, calls: list[Any]) -> None:
    options = "--model m --context 2048 --turn 1000 --streams 2 --reps 5 --json out.json"
    assert run("bench", "load", *options.split()) == 0
    [(_, named)] = calls
    del named["console"]
    assert named == {
        "model": "m",
        "context": 2048,
        "turn": 1000,
        "streams": 2,
        "reps": 5,
        "json_path": Path("out.json"),
    }


def test_bench_store_passes_its_options(run: Run, calls: list[Any], tmp_path: Path) -> None:
    sizes = "--tokens 900 --prompts 3 --context 600 --steps 20 --reps 5 --episodes 40 --real 4"
    rest = f"--parts payload,decode --json out.json --resume --folder {tmp_path}"
    assert run("bench", "store", *f"--model m {sizes} {rest}".split()) == 0
    [(args, named)] = calls
    del named["console"]
    assert args == (("m", 900, 3, 600, 20, 5, 40, 4),)
    assert named == {
        "parts": ["payload", "decode"],
        "json_path": Path("out.json"),
        "resume": True,
        "folder": tmp_path,
    }


def test_bench_store_measures_every_part_by_default(run: Run, calls: list[Any]) -> None:
    assert run("bench", "store") == 0
    [(args, named)] = calls
    assert args == (("smollm2", 8000, 50, 4096, 60, 7, 1000, 50),)
    assert named["parts"] == ["payload", "decode", "resume", "restore", "episodes"]


@pytest.mark.parametrize("options", ["--reps 0", "--prompts 121", "--episodes 1", "--folder missing", "--resume"])
def test_bench_store_refuses_what_it_cannot_measure(options: str, run: Run, calls: list[Any]) -> None:
    assert run("bench", "store", *options.split()) == 2
    assert calls == []


def test_store_looks_into_a_store(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agentcache.store.tiers.disk import DiskStore

    with DiskStore(tmp_path / "store", 1 << 20):
        pass
    url = f"disk://{tmp_path}/store"
    assert run("store", "verify", url) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all checksums match"
    assert run("store", "ls", f"disk://{tmp_path}/typo") == 2
    assert "there is no store folder" in capsys.readouterr().err


def test_bench_diff_prints_and_writes_each_case(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "diff.json"
    assert run("bench", "diff", "--tokens", "16384", "--reps", "1", "--json", str(file)) == 0
    cases = [row["case"] for row in json.loads(file.read_text())["rows"]]
    out = capsys.readouterr().out
    assert len(cases) >= 2
    assert all(case in out for case in cases)


def test_a_json_file_in_no_folder_is_refused_before_the_work(run: Run, calls: list[Any], tmp_path: Path) -> None:
    assert run("demo", "--json", str(tmp_path / "missing" / "out.json")) == 2
    assert calls == []
