"""The bench command, its rows, and that it needs nothing but torch and an implementation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import agentcache.kernels
from agentcache.kernels import cpu_backend
from agentcache.kernels.bench.__main__ import main
from agentcache.kernels.bench.check import check

ROW = {"op", "tag", "device", "tokens", "layers", "kv_heads", "head_dim", "gb_s", "copy_gb_s", "share", "ms"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "out.json"
    arguments = ["--json", str(path), "--tokens", "70", "--layers", "2", "--kv-heads", "2", "--repeats", "7"]
    assert main([*arguments, "--device", "cpu"]) == 0
    return json.loads(path.read_text())


def test_rows_carry_what_a_reader_compares(result):
    for row in result["rows"]:
        assert set(row) == ROW | {"shift", "aligned"}
        assert row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"]
        assert row["share"] == pytest.approx(row["gb_s"] / row["copy_gb_s"])
        assert (row["device"], row["tokens"], row["kv_heads"], row["head_dim"]) == ("cpu", 70, 2, 64)


def test_every_tag_shift_and_alignment_is_measured(result):
    restored = {(r["tag"], r["shift"], r["aligned"]) for r in result["rows"] if r["op"] == "dequantize_scatter"}
    assert restored == {(t, s, a) for t in ("exact", "k8v8", "k8v4") for s in (0, 5) for a in (True, False)}
    assert {r["op"] for r in result["rows"]} == {
        "dequantize_scatter",
        "quantize_gather",
        "attention_mass",
        "value_residual",
    }


def test_the_machine_and_the_versions_are_named(result):
    assert result["implementation"] == "numba"
    assert result["hardware"]["attention_isa"] in ("vec", "amx")
    assert result["hardware"]["threads"] == torch.get_num_threads()
    assert result["versions"]["torch"] == torch.__version__
    assert result["tags"]["exact"] == {"payload_ratio": 1.0, "k_error": 0.0, "v_error": 0.0}


def test_refuses_too_few_repeats(capsys):
    with pytest.raises(SystemExit):
        main(["--repeats", "6"])
    assert "medians need at least 7" in capsys.readouterr().err


@pytest.mark.parametrize("isa", ["vec", "amx", "flash_attn"])
def test_the_check_passes(isa):
    check(torch.device("cpu"), "numba", 64, 32, isa, torch.bfloat16, 1)


def test_the_check_sees_a_wrong_cell(monkeypatch):
    right = cpu_backend.CpuBackend.dequantize_scatter

    def wrong(self, pieces, pages, table):
        right(self, pieces, pages, table)
        pages[0].view(torch.int16)[77] ^= 4

    monkeypatch.setattr(cpu_backend.CpuBackend, "dequantize_scatter", wrong)
    with pytest.raises(AssertionError):
        check(torch.device("cpu"), "numba", 64, 32, "vec", torch.bfloat16, 1)


def test_needs_only_torch(tmp_path):
    (tmp_path / "agentcache").mkdir()
    (tmp_path / "agentcache" / "kernels").symlink_to(Path(agentcache.kernels.__file__).parent)
    code = """if True:
        import sys
        sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
        for name in ("numba", "triton", "vllm", "transformers", "pydantic", "typer", "rich", "xxhash", "agentcache.errors"):
            sys.modules[name] = None
        import torch
        from agentcache.kernels.bench.check import check
        check(torch.device("cpu"), "auto", 64, 16, "flash_attn", torch.bfloat16, 3)
        import agentcache
        print(agentcache.__path__[0])
    """
    run = [sys.executable, "-c", code]
    done = subprocess.run(
        run, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "agentcache")
