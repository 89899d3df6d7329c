#!/usr/bin/env bash
# Builds and runs everything that needs a GPU, in one call, and writes the results as JSON:
#   [MKERNEL_COMMIT=HASH] scripts/gpu.sh OUT_DIR      (the hash where the tree is a copy without history)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu.sh OUT_DIR}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
mkdir -p "$out"

gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
commit=${MKERNEL_COMMIT:-$(git rev-parse --verify --quiet HEAD || echo unknown)}

nvcc -std=c++20 -arch=sm_90a --expt-relaxed-constexpr -Iinclude -Isrc src/plan/plan_device_test.cu -o "$build/plan_device_test"
result=$("$build/plan_device_test")
printf '{"command": "scripts/gpu.sh", "commit": "%s", "gpu": "%s", "driver": "%s", "plan_device_test": %s}\n' \
  "$commit" "$gpu" "$driver" "$result" | tee "$out/plan_device_test.json"
