"""The Triton kernels run by the interpreter: odd sizes, poisoned destinations, every layout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cases import INTERPRETED, case_name

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def results():
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [case_name(case) for case in INTERPRETED])
def test_interpreted_kernels_agree_with_their_twins(results, name):
    assert results[name] is None, results[name]
