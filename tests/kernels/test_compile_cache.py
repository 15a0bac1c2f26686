"""Compiled loops are kept on disk, and made again when a source that they inline changes."""

import os
import subprocess
import sys

import pytest

from agentcache.kernels import cpu_compile

BUILD = """if True:
    import torch
    from agentcache.kernels import Kernels, PageLayout, Strides
    from agentcache.kernels.cpu_value_residual import residual
    shape = (1, 32, 32)
    layout = PageLayout.from_strides(shape, 2048, Strides(0, 0, 1, 32), Strides(1024, 0, 32, 1))
    Kernels(layout, layers=1, dtype=torch.bfloat16, implementation="numba")
    stats = residual.stats
    print(len(stats.cache_hits), len(stats.cache_misses))
"""


@pytest.mark.slow
def test_the_next_process_loads_what_this_one_compiled(tmp_path):
    seen = []
    for _ in range(2):
        run = [sys.executable, "-P", "-c", BUILD]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout.split())
    assert seen == [["0", "1"], ["1", "0"]]


def test_another_source_has_another_key(monkeypatch):
    from agentcache.kernels.cpu_value_residual import residual

    def key():
        (codegen,) = (residual.targetctx.codegen(),)
        return residual._cache._index_key((), codegen)

    before = key()
    assert before == key()
    monkeypatch.setattr(cpu_compile, "_sources_digest", lambda: "another")
    assert key() != before
