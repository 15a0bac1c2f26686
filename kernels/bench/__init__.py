"""Measures the kernels beside a plain copy: `python -m agentcache.kernels.bench --json out.json`. Needs torch, and numba or triton."""
