"""`agentcache profile` on a real engine, killed and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentcache.profiling.profile import Profile

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAIRS = 16


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    from tests.models import make_tiny

    return make_tiny("llama", tmp_path / "tiny")


def start(model: Path, out: Path) -> subprocess.Popen[bytes]:
    arguments = ["profile", str(model), "--out", str(out), "--pairs", str(PAIRS), "--max-tokens", "1536"]
    return subprocess.Popen([sys.executable, "-c", "from agentcache.cli import main; main()", *arguments])


def lines(out: Path) -> int:
    work = out.with_name(f"{out.name}.work.jsonl")
    return work.read_bytes().count(b"\n") if work.exists() else 0


@pytest.mark.parametrize("count", [3, 12])
def test_killed_and_started_again_it_ends_with_the_same_file(tiny: Path, tmp_path: Path, count: int) -> None:
    whole, other = tmp_path / "whole.json", tmp_path / "other.json"
    assert start(tiny, whole).wait(300) == 0
    run = start(tiny, other)
    end = time.monotonic() + 300
    while lines(other) < count:
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait(60)
    assert not other.exists() and count <= lines(other) < lines(whole)
    assert start(tiny, other).wait(300) == 0
    assert other.read_bytes() == whole.read_bytes()
    profile = Profile.load(whole)
    assert profile.model.name == "tiny" and profile.attention_layers == (0, 1, 2, 3)
    assert lines(other) == lines(whole)
