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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import make_tiny

    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "profile.json"
    assert start(tiny, out).wait(400) == 0
    return out


def start(model: Path, out: Path) -> subprocess.Popen[bytes]:
    arguments = ["profile", str(model), "--out", str(out), "--pairs", "16", "--max-tokens", "1536"]
    return subprocess.Popen([sys.executable, "-c", "from agentcache.cli import main; main()", *arguments])


def lines(out: Path) -> int:
    work = out.with_name(f"{out.name}.work.jsonl")
    return work.read_bytes().count(b"\n") if work.exists() else 0


@pytest.mark.parametrize("count", [3, 12])
def test_killed_and_started_again_it_ends_with_the_same_file(
    tiny: Path, whole: Path, tmp_path: Path, count: int
) -> None:
    """Among the training edits, and among those that calibrate."""
    out = tmp_path / "profile.json"
    run = start(tiny, out)
    end = time.monotonic() + 300
    while lines(out) < count:
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait(60)
    assert not out.exists() and count <= lines(out) < lines(whole)
    assert start(tiny, out).wait(300) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert lines(out) == lines(whole)


def test_the_profile_is_of_the_model_that_was_measured(whole: Path) -> None:
    profile = Profile.load(whole)
    assert profile.model.name == "tiny" and profile.attention_layers == (0, 1, 2, 3)
    assert {source.split for source in profile.data} == {"train", "calibration"}
