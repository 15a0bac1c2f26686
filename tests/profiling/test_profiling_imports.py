from __future__ import annotations

import subprocess
import sys

PURE = "profile, model, lookup, edits, datasets, fit, calibrate"


def imported(code: str, names: str) -> str:
    code = f"import sys\n{code}\nprint(sorted({{{names}}} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_profiles_need_neither_torch_nor_vllm_nor_what_only_fits_and_plots_need() -> None:
    code = f"from agentcache.profiling import {PURE}"
    assert imported(code, "'torch', 'vllm', 'transformers', 'sklearn', 'matplotlib'") == "[]"


def test_the_package_imports_nothing_of_profiling() -> None:
    assert imported("import agentcache", "'sklearn', 'matplotlib', 'agentcache.profiling.profile'") == "[]"
