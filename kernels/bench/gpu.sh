#!/bin/sh
# Checks the kernels on this machine's GPU, then measures them as a share of a device copy.
# Needs only torch and triton: nothing is installed, the kernels are linked into a package of their own.
# Usage: kernels/bench/gpu.sh [OUT.json]     (PYTHON names another interpreter)
set -eu
kernels=$(cd "$(dirname "$0")/.." && pwd)
out=$(realpath -m "${1:-gpu-bench.json}")
python=${PYTHON:-python3}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir "$root/agentcache"
ln -s "$kernels" "$root/agentcache/kernels"
cd "$root"
export PYTHONPATH="$root"
"$python" -m agentcache.kernels.bench.check --device cuda --implementation triton
"$python" -m agentcache.kernels.bench --device cuda --implementation triton --tokens 16384 --layers 28 --kv-heads 8 \
    --head-dim 128 --json "$out"
echo "wrote $out"
