#!/usr/bin/env bash
# What `make test-rdma` runs inside the virtual machine of rdma_vm.sh; with RDMA devices of its own a machine can run it
# directly. Usage: rdma_tests.sh BUILD_FOLDER [conformance|run|failures|speed]...
# Prints a line per part and ends with exit code 1 if one has failed.
set -uo pipefail
build=$(cd "$1" && pwd)
shift
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(conformance run failures speed)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Software devices in an emulated machine write some 50 MB/s, so the long counts are divided.
export MKERNEL_TEST_SLOWNESS=${MKERNEL_TEST_SLOWNESS:-10}
export MKERNEL_CONFORMANCE_SCALE=${MKERNEL_CONFORMANCE_SCALE:-100}
log=$(mktemp)
failed=0

# check NAME COMMAND...: one line about it, and all that it said when it fails.
check() {
  local name=$1 begin=$SECONDS
  shift
  if "$@" >"$log" 2>&1; then
    printf '%-58s good, %d s%s\n' "$name" $((SECONDS - begin)) "$(summary)"
  else
    printf '%-58s FAILED (exit code %d)\n' "$name" $?
    tail -n 60 "$log"
    failed=1
  fi
}
# Of a GoogleTest program: how many tests ran. A test that was skipped is no good sign here.
summary() {
  sed -n 's/^\[  PASSED  \] \(.*\)/, \1 passed/p; s/^\[  SKIPPED \] \([0-9]* tests*\).*/, \1 skipped/p' "$log" | tr -d '\n'
}
# One process per rank, by Open MPI. Good when C is right and the network was the one that was asked for.
run_mkernel() {
  local ranks=$1
  shift
  mpirun --oversubscribe --mca btl self,sm -np "$ranks" "$build/mkernel" run "$@" --repeat 2 || return 1
  grep -q '^  network   verbs.* on rxe' "$log" && grep -q '^  check     ok' "$log"
}

part_conformance() {
  local kind
  for kind in verbs verbs_silent verbs_counted1 verbs_counted3_shuffled; do
    check "conformance over $kind" "$build/net_conformance_test" --gtest_filter="*ConformanceTest*/$kind:*PlansTest*/$kind"
  done
}
part_run() {
  local network op
  for network in verbs verbs-counted; do
    for op in ag_gemm gemm_rs gemm_ar; do
      check "$op over $network, 2 nodes x 1" run_mkernel 2 $op --network $network --m 250 --n 120 --k 300
      check "$op over $network, 2 nodes x 2" run_mkernel 4 $op --network $network --gpus 2 --m 250 --n 120 --k 300
    done
  done
  check "mkernel info" "$build/mkernel" info
  cat "$log"
}
part_failures() {
  export MKERNEL_NETWORK
  for MKERNEL_NETWORK in verbs verbs-counted; do
    check "programs over $MKERNEL_NETWORK, killed and not" "$build/tests_cli_test" --gtest_filter='ProcessesTest.*'
    grep -E 'kills,' "$log"
    check "worlds over $MKERNEL_NETWORK" "$build/ops_test" --gtest_filter='ProcessesTest.*'
  done
  unset MKERNEL_NETWORK
}
part_speed() {
  check "mKernel between two processes" env MKERNEL_SPEED_ROUNDS=500 MKERNEL_SPEED_MEGABYTES=100 \
    "$build/net_conformance_test" --gtest_filter='*Speed*/verbs*'
  grep -E 'MB/s' "$log"
  command -v ib_write_bw >/dev/null || { echo "no ib_write_bw here (perftest): nothing to compare with"; return; }
  ib_pair ib_write_bw -s 1048576 -n 100 -t 16 | awk '/^ *1048576/ {printf "ib_write_bw         1 MiB %.1f MB/s\n", $4}'
  ib_pair ib_write_lat -s 8 -n 500 | awk '/^ *8 / {printf "ib_write_lat        8 B %s us (median)\n", $5}'
  ib_pair ib_write_lat -s 4096 -n 500 | awk '/^ *4096 / {printf "ib_write_lat        4 KiB %s us (median)\n", $5}'
}
# A server on the first device and a client on the second; what the client says.
ib_pair() {
  local tool=$1 server
  shift
  "$tool" -d rxe0 -x 1 -F --report_gbits "$@" >/dev/null 2>&1 &
  server=$!
  sleep 3
  "$tool" -d rxe1 -x 1 -F "$@" 10.77.0.1
  wait "$server"
}

for part in "${parts[@]}"; do "part_$part"; done
exit $failed
