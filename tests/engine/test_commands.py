"""The measuring commands on a tiny model: their JSON has what users and later commands read. Numbers are not judged here."""

import json
from io import StringIO

import pytest
from rich.console import Console

from agentcache import bench_auto, bench_load, bench_resume
from agentcache.demo import run_demo
from agentcache.doctor import run_doctor
from tests.models import make_tiny

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def console():
    return Console(file=StringIO(), width=100)


def text(console):
    return console.file.getvalue()


def test_doctor_finds_a_working_engine(tiny, console):
    assert run_doctor(tiny, False, console), text(console)
    assert "everything works" in text(console)
    assert "✗" not in text(console)


def test_doctor_says_why_a_model_is_refused(tmp_path, console):
    model = make_tiny("gemma3", tmp_path / "gemma3")
    assert not run_doctor(str(model), False, console)
    assert "sliding-window" in text(console)


def test_bench_resume_writes_its_json(tiny, console, tmp_path):
    path = tmp_path / "out.json"
    policies = ["prefix_cache", "direct_reuse", "edit_local"]
    bench_resume.run(model=tiny, context=600, edit_at=0.3, policies=policies, reps=2, json_path=path, console=console)
    result = json.loads(path.read_text())
    assert {"model", "context", "edit_at", "floor_ms", "decode_ms", "versions", "hardware", "rows"} <= result.keys()
    rows = {row["policy"]: row for row in result["rows"]}
    assert list(rows) == policies
    for row in rows.values():
        assert {"p20", "p50", "p80"} == row["ttft_ms"].keys()
        assert row["reason"] is None
    assert rows["prefix_cache"]["kl_to_exact"] < 1e-3
    assert rows["prefix_cache"]["speedup"] == 1.0
    assert rows["direct_reuse"]["recomputed_tokens"] == 40
    assert rows["edit_local"]["recomputed_tokens"] == 72
    # vLLM's own hit ends at a block, the rest of P and F comes from the checkpoint.
    assert rows["edit_local"]["restored_tokens"] == 607 - 180 // 32 * 32 - 72
    assert "edit_local" in text(console)


@pytest.mark.slow
def test_bench_auto_goes_on_with_its_json(tiny, console, tmp_path):
    path = tmp_path / "out.json"
    how = {
        "model": tiny,
        "candidate": "edit_local:k=16",
        "margin": 0.1,
        "edits": 3,
        "reps": 1,
        "data": "sample",
        "seed": 2,
    }
    whole = bench_auto.run(**how, max_tokens=900, json_path=path, resume=False, console=console)
    result = json.loads(path.read_text())
    assert result["summary"]["edits"] == len(result["measured"]) == 3
    assert {"median_ratio", "ratio_of_medians", "saving_share"} <= result["summary"].keys()
    for edit in result["measured"]:
        assert edit["ttft_ms"].keys() == {"prefix_cache", "edit_local:k=16", "auto"}
        assert edit["chosen"] in ("prefix_cache", "edit_local")
    path.write_text(json.dumps({**result, "measured": result["measured"][:2]}))
    again = bench_auto.run(**how, max_tokens=900, json_path=path, resume=True, console=console)
    assert again["measured"][:2] == whole["measured"][:2]
    assert [edit["id"] for edit in again["measured"]] == [edit["id"] for edit in whole["measured"]]


@pytest.mark.slow
def test_bench_load_writes_its_json(tiny, console, tmp_path):
    path = tmp_path / "out.json"
    bench_load.run(model=tiny, context=600, turn=400, streams=2, reps=1, json_path=path, console=console)
    result = json.loads(path.read_text())
    assert result["p95_ratio"] > 0
    assert min(result["steps"].values()) > 0


@pytest.mark.slow
def test_demo_compares_every_turn(smollm2_path, console, tmp_path):
    path = tmp_path / "demo.json"
    run_demo(str(smollm2_path), path, console)
    rows = json.loads(path.read_text())["rows"]
    assert [row["edit"] for row in rows] == ["first version", "append", "tool result replaced", "summarisation"]
    edited = rows[2]
    assert edited["fresh"] > 0
    assert edited["repair"] == 32
    assert edited["reused"] > 3000
    for row in rows[1:]:
        assert row["reason"] is None
        assert row["kl"] >= 0
