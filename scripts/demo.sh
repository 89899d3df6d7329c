#!/usr/bin/env bash
# Shows what mKernel does, on this machine, in under two minutes. Usage: demo.sh BUILD_DIR
# Writes a timeline to build/demo/trace.json. Ends with an error as soon as a step fails.
set -euo pipefail

if [[ $# -ne 1 || ! -x $1/mkernel ]]; then
  echo "usage: demo.sh BUILD_DIR, where BUILD_DIR holds the program mkernel (make demo builds it)" >&2
  exit 2
fi
mkernel=$(realpath "$1")/mkernel
cd "$(dirname "$0")/.."
mkdir -p build/demo

# Prints a command as its user would type it, then runs it.
show() {
  printf '\n$ mkernel %s\n' "$*"
  "$mkernel" "$@"
}

"$mkernel" info

printf '\n== 1. Fused GEMM + AllReduce, for real: 2 nodes x 4 ranks in this process, threads instead of SMs.\n'
printf '      The network is made as slow as the arithmetic; the result is compared with fp64.\n'
show run gemm_all_reduce --nodes 2 --gpus 4 --m 1k --n 1k --k 16k --chunk-tiles 2 \
  --link balanced --compare --check --trace build/demo/trace.json

printf '\n== 2. The same plan in virtual time, on two nodes of eight H200.\n'
show sim gemm_all_reduce --preset h200x8-ib --nodes 2 --gpus 8 --m 16k --n 16k --k 16k --compare

printf '\n== 3. A proof that a plan is right, for an odd world: 3 nodes x 5 GPUs.\n'
show verify gemm_all_reduce --nodes 3 --gpus 5 --m 1000 --n 700 --k 64

cat <<'END'

Where to look next:
  build/demo/trace.json        the timeline of step 1: open it in https://ui.perfetto.dev
  mkernel plan gemm_ar         what each rank does, task by task
  mkernel sim all --seeds 1:100    random worlds with faults, checked for races
  mkernel --help               all commands; README.md for the rest
END
