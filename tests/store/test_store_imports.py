from __future__ import annotations

import subprocess
import sys


def test_planning_and_the_index_need_neither_torch_nor_vllm() -> None:
    code = "import sys, agentcache.recovery, agentcache.store; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
