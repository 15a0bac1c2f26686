"""`agentcache bench store`: what it refuses, writes and tells, and runs on a tiny model. Numbers are not judged here."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentcache import bench_store
from agentcache.bench_store import PARTS, StoreBench, run
from agentcache.bench_store_report import print_summary, summarise
from agentcache.errors import ConfigError
from tests.models import make_tiny


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=100)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that are measured, in place of their measuring."""
    measured: list[str] = []

    def part(self: Any, name: str) -> dict[str, Any]:
        measured.append(name)
        return MEASURED[name]

    monkeypatch.setattr(bench_store._Bench, "part", part)
    return measured


def _times(ms: float) -> dict[str, Any]:
    return {"aligned0": {"p50": ms}, "shifted": {"p50": 2 * ms}}


MEASURED: dict[str, dict[str, Any]] = {
    "payload": {
        "payload_ratio": 0.42,
        "tokens": 8000,
        "tag_mix": {"exact": 0.1, "k8v4": 0.9},
        "kl": {"mixed": {"mean": 0.003, "interval": [0.002, 0.005]}},
    },
    "decode": {"p95_ratio": 1.1},
    "resume": {"rows": {"k8v4": {"ratio_to_exact": 1.02}}},
    "restore": {
        "tokens": 4096,
        "restore_ms": {tag: _times(3.0) for tag in ("exact", "k8v4", "mixed")},
        "share": {tag: {"aligned0": 0.8, "shifted": 0.4} for tag in ("exact", "k8v4", "mixed")},
        "copy_ms": {"p50": 2.5},
        "isa": "vec",
    },
    "episodes": {
        "paused_episodes": 1000,
        "bytes": {"disk": 105, "memory": 103},
        "distinct_bytes": {"disk": 100, "memory": 100},
        "bytes_ratio": {"disk": 1.05, "memory": 1.03},
        "open_s": 1.5,
        "resumed_episodes": 50,
        "resumed_correct": 50,
    },
}
SMALL = StoreBench("m", episodes=8, real=2)


def test_the_json_has_the_fields_that_are_promised(parts: list[str], console: Console, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    run(SMALL, json_path=path, folder=tmp_path, console=console)
    made = json.loads(path.read_text())
    assert parts == [*PARTS]
    assert made["restore_ms"] == {"exact": 6.0, "k8v4": 6.0, "mixed": 6.0}
    promised = {
        "payload_ratio": 0.42,
        "kl_mean": 0.003,
        "kl_interval": [0.002, 0.005],
        "copy_ms": 2.5,
        "decode_p95_ratio": 1.1,
        "resume_ttft_ratio": 1.02,
        "paused_episodes": 1000,
        "bytes": {"disk": 105, "memory": 103},
        "distinct_bytes": {"disk": 100, "memory": 100},
        "open_s": 1.5,
        "resumed_episodes": 50,
        "resumed_correct": 50,
    }
    assert promised.items() <= made.items()
    assert {"model", "data", "settings", "versions", "hardware", "parts", "tag_mix"} <= made.keys()
    assert [*tmp_path.iterdir()] == [path]


def test_parts_that_were_not_measured_are_none(parts: list[str], console: Console, tmp_path: Path) -> None:
    made = run(SMALL, parts=["decode"], folder=tmp_path, console=console)
    assert parts == ["decode"]
    assert made["decode_p95_ratio"] == 1.1
    assert made["payload_ratio"] is made["restore_ms"] is made["resume_ttft_ratio"] is made["bytes"] is None


def test_a_run_that_was_cut_off_goes_on_where_it_was(
    parts: list[str], console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.json"
    whole = MEASURED["resume"]
    monkeypatch.delitem(MEASURED, "resume")
    with pytest.raises(KeyError):
        run(SMALL, json_path=path, folder=tmp_path, console=console)
    assert {*json.loads(path.read_text())["parts"]} == {"payload", "decode"}
    monkeypatch.setitem(MEASURED, "resume", whole)
    del parts[:]
    made = run(SMALL, json_path=path, resume=True, folder=tmp_path, console=console)
    assert parts == ["resume", "restore", "episodes"]
    assert made["decode_p95_ratio"] == 1.1
    assert made == json.loads(path.read_text())


def test_without_resume_everything_is_measured_anew(parts: list[str], console: Console, tmp_path: Path) -> None:
    for _ in range(2):
        run(SMALL, parts=["decode"], json_path=tmp_path / "store.json", folder=tmp_path, console=console)
    assert parts == ["decode", "decode"]


@pytest.mark.parametrize("text", ["no json", "[]", '{"parts": 3}'])
def test_a_file_of_something_else_is_not_gone_on_with(
    text: str, parts: list[str], console: Console, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not what this command has written"):
        run(SMALL, json_path=path, resume=True, folder=tmp_path, console=console)
    assert parts == []
    assert path.read_text() == text


def test_a_file_of_other_settings_is_not_gone_on_with(parts: list[str], console: Console, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    run(SMALL, parts=["decode"], json_path=path, folder=tmp_path, console=console)
    with pytest.raises(ConfigError, match="has other settings than this run"):
        run(StoreBench("m", episodes=9, real=2), json_path=path, resume=True, folder=tmp_path, console=console)


@pytest.mark.parametrize(
    ("settings", "chosen", "why"),
    [
        (SMALL, ["payload", "speed"], "give some of payload, decode"),
        (SMALL, [], "give some of"),
        (StoreBench("m", episodes=3, real=2), ["episodes"], "give at least 4"),
        (StoreBench("m", episodes=10_000_000, real=2), ["episodes"], "GB of disk"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_starts(
    settings: StoreBench, chosen: list[str], why: str, parts: list[str], console: Console, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        run(settings, parts=chosen, folder=tmp_path, console=console)
    assert parts == []


def test_too_little_memory_is_known_before_it_starts(
    parts: list[str], console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_store, "_available_bytes", lambda: 1 << 30)
    with pytest.raises(ConfigError, match="GB of memory"):
        run(SMALL, folder=tmp_path, console=console)
    run(SMALL, parts=["payload"], folder=tmp_path, console=console)
    assert parts == ["payload"]


def test_the_table_puts_what_was_measured_beside_the_goal(console: Console) -> None:
    print_summary(summarise({"model": "m", "parts": MEASURED}), console)
    out = console.file.getvalue()
    for text in (
        "0.420",
        "≤ 0.45",
        "0.0030",
        "1.10×",
        "1.02×",
        "1.25×",
        "40%",
        "6.0 ms",
        "1.050",
        "1.50 s",
        "50 of 50",
    ):
        assert text in out
    assert "in memory" in out


@pytest.mark.engine
def test_the_payload_part_runs_on_a_tiny_model(
    tmp_path: Path, console: Console, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = str(make_tiny("llama", tmp_path_factory.mktemp("bench") / "llama"))
    settings = StoreBench(model, tokens=300, prompts=1, context=256, steps=4, reps=1)
    made = run(settings, parts=["payload"], folder=tmp_path, console=console)
    assert made["parts"]["payload"]["tokens"] == 300
    assert made["kl_mean"] >= 0
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []


@pytest.mark.slow
@pytest.mark.engine
def test_every_part_runs_on_a_tiny_model(
    tmp_path: Path, console: Console, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_store, "_available_bytes", lambda: 1 << 40)
    model = str(make_tiny("llama", tmp_path_factory.mktemp("bench") / "llama"))
    settings = StoreBench(model, tokens=300, prompts=1, context=256, steps=4, reps=1, episodes=5, real=1)
    path = tmp_path / "store.json"
    run(settings, json_path=path, folder=tmp_path, console=console)
    made = json.loads(path.read_text())
    payload, decode, resume, restore, episodes = (made["parts"][p] for p in PARTS)
    assert payload["tokens"] == 300
    assert sum(payload["tag_mix"].values()) == pytest.approx(1, abs=1e-3)
    assert payload["kl"]["exact"]["mean"] < 1e-3
    assert payload["bytes"] > payload["row_bytes"] + payload["attention_bytes"] >= payload["row_bytes"] + 300
    assert min(decode["steps"].values()) >= 4
    assert decode["saves_seen_open"] > 0
    assert {arm: row["recomputed_tokens"] for arm, row in resume["rows"].items()} == dict.fromkeys(resume["rows"], 72)
    assert restore["tokens"] == 256
    assert set(made["restore_ms"]) == {"exact", "k8v4", "mixed"}
    assert episodes["versions"] == 4 * 11 + 2
    assert (made["resumed_episodes"], made["resumed_correct"]) == (1, 1)
    assert (episodes["resumed_bulk_whole"], episodes["not_correct"]) == (1, [])
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []
