#!/usr/bin/env bash
# Builds and runs everything that needs a GPU, and writes results as JSON:
#   scripts/gpu.sh OUT_DIR [tests] [sanitize] [bench]      (all three when none is named)
# MKERNEL_BUILD=DIR  takes the programs from there instead of building them (a build made elsewhere; its shared
#                    libraries may lie beside them).
# MKERNEL_COMMIT     the commit, where the tree is a copy without history.
# MKERNEL_BENCH      what to measure, as lines of `mkernel bench` arguments, instead of the suites.
# Exit code 1 when anything failed; everything named is run all the same.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu.sh OUT_DIR [tests] [sanitize] [bench]}
shift
parts=${*:-tests sanitize bench}
mkdir -p "$out"
export MKERNEL_COMMIT=${MKERNEL_COMMIT:-$(git rev-parse --verify --quiet HEAD || echo unknown)}
failed=0

if [[ -n ${MKERNEL_BUILD:-} ]]; then
  build=$MKERNEL_BUILD
  export LD_LIBRARY_PATH=$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  build=build/cuda
  cmake --preset cuda && cmake --build --preset cuda --parallel "$(nproc)" || exit 1
fi
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:/usr/local/cuda/lib64

run() { # NAME SECONDS COMMAND...: the output goes to OUT_DIR/NAME.log, a line to the terminal
  local name=$1 seconds=$2 status=0
  shift 2
  timeout "$seconds" "$@" >"$out/$name.log" 2>&1 || status=$?
  case $status in
    0) echo "ok       $name" ;;
    77) echo "skipped  $name: $(tail -n 1 "$out/$name.log")" ;;
    *) echo "FAILED   $name (exit code $status)"; tail -n 15 "$out/$name.log" | cut -c1-300; failed=1 ;;
  esac
}

for part in $parts; do
  case $part in
    tests)
      run tests_gpu 400 "$build/tests_gpu_test"
      # Processes that share the GPU run in turn, so this takes its time.
      run gpu_processes 240 env MKERNEL_CLI="$build/mkernel" "$build/tests_cli_test" --gtest_filter='GpuProcesses*:GpuNodes*'
      for program in gpu_stream_test plan_device_test wire_test cuda_network_test; do
        [[ -x $build/$program ]] && run "$program" 120 "$build/$program"
      done
      # Planted faults, some of which hang until the program ends them, and 10,000 delayed launches per operator.
      [[ -x $build/kernel_faults_test ]] && run kernel_faults_test 400 "$build/kernel_faults_test"
      # GoogleTest ends well when all was skipped.
      for log in tests_gpu gpu_processes; do
        if grep -q "SKIPPED" "$out/$log.log"; then
          echo "FAILED   $log: tests were skipped"
          failed=1
        fi
      done
      ;;
    sanitize)
      # racecheck names the slots of the task ring; whether it follows their mbarriers is open (docs/testing.md).
      # Heaps are cleared when they are made, so initcheck speaks of the callers' matrices.
      for tool in memcheck synccheck racecheck initcheck; do
        for op in all_gather_gemm gemm_reduce_scatter gemm_all_reduce; do
          run "$tool-$op" 120 compute-sanitizer --tool $tool --error-exitcode 9 "$build/mkernel" run "$op" --device cuda \
            --nodes 1 --gpus 2 --sms 8 --m 300 --n 520 --k 200 --repeat 2 --deadline 100
        done
        run "$tool-ring_attention" 120 compute-sanitizer --tool $tool --error-exitcode 9 "$build/mkernel" run \
          ring_attention --device cuda --nodes 1 --gpus 2 --sms 8 --seq 700 --heads 4 --kv-heads 2 --causal --repeat 2 \
          --deadline 100
      done
      ;;
    bench)
      if [[ -n ${MKERNEL_BENCH:-} ]]; then
        i=0
        while read -r line; do
          [[ -z $line ]] && continue
          # shellcheck disable=SC2086
          run "bench-$((i++))" 200 "$build/mkernel" bench $line
        done <<<"$MKERNEL_BENCH"
      else
        for suite in gemm_core virtual_cluster small hierarchical command_ring; do
          run "bench-$suite" 1200 "$build/mkernel" bench suite $suite --json "$out/$suite-h200.json"
        done
      fi
      ;;
    *) echo "unknown part: $part" >&2; exit 2 ;;
  esac
done
exit $failed
