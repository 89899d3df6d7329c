#!/usr/bin/env bash
# What `make test-rdma` runs inside the virtual machine of rdma_vm.sh; with RDMA devices of its own a machine can run it
# directly. Usage: rdma_tests.sh BUILD_FOLDER [conformance|run|failures|links|speed]...
# Prints a line per part and ends with exit code 1 if one has failed.
set -uo pipefail
build=$(cd "$1" && pwd)
shift
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(conformance run failures links speed)
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
  for kind in verbs verbs_silent verbs_counted1 verbs_counted3_shuffled verbs_rails2 verbs_counted3_shuffled_rails4; do
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
# Links that lose, delay and end; only between the two devices of the virtual machine.
part_links() {
  [[ -d /sys/class/net/va0 ]] || { echo "links: left out, there is no va0 (rdma_vm.sh makes it)"; return; }
  local network
  for network in verbs verbs-counted; do
    tc qdisc add dev va0 root netem loss 2%
    check "gemm_ar over $network, 2 % of packets lost" run_mkernel 2 gemm_ar --network $network --m 250 --n 120 --k 300
    tc qdisc replace dev va0 root netem delay 200ms
    check "gemm_ar over $network, 200 ms late" run_mkernel 2 gemm_ar --network $network --m 250 --n 120 --k 300
    tc qdisc del dev va0 root
    check "gemm_ar over $network, the link goes down" link_goes_down $network
    cat "$log.why"
  done
}
# Good when both ranks end with exit code 3 and one sentence that names the other.
link_goes_down() {
  local rank pids=() code=0 begin
  for rank in 0 1; do
    MKERNEL_RANK=$rank MKERNEL_SIZE=2 MKERNEL_JOB="link $1" "$build/mkernel" run gemm_ar --network "$1" --m 250 --n 120 \
      --k 300 --repeat 1000000 --no-check >/dev/null 2>"$log.$rank" &
    pids+=($!)
  done
  sleep 20
  ip link set vb0 down
  begin=$SECONDS
  for rank in 0 1; do
    wait "${pids[rank]}"
    [[ $? -eq 3 ]] || code=1
    grep -Eq "^mkernel.*rank $((1 - rank))" "$log.$rank" || code=1
  done
  echo "  $((SECONDS - begin)) s later:" >"$log.why"
  grep -h '^mkernel' "$log.0" "$log.1" | sed 's/^/    /' >>"$log.why"
  ip link set vb0 up
  ip address replace 10.77.0.2/24 dev vb0
  cat "$log.0" "$log.1"
  sleep 2
  return $code
}
# In turn, so that both meet the same machine; medians of three.
part_speed() {
  local round
  command -v ib_write_bw >/dev/null || echo "no ib_write_bw here (perftest): nothing to compare with"
  : >"$log.speed"
  for round in 1 2 3; do
    check "speed between two processes, round $round" env MKERNEL_SPEED_ROUNDS=500 MKERNEL_SPEED_MEGABYTES=50 \
      "$build/net_conformance_test" --gtest_filter='*Speed*/verbs*'
    awk '/MB\/s$/ {print $1, "8_B", $4, "us"; print $1, "4_KiB", $8, "us"; print $1, "1_MiB", $12, "MB/s"}' "$log" >>"$log.speed"
    command -v ib_write_bw >/dev/null || continue
    # MB of perftest are 2^20 bytes.
    ib_pair ib_write_bw -s 1048576 -n 50 -t 16 | awk '/^ *1048576/ {print "ib_write_bw 1_MiB", $4 * 1.048576, "MB/s"}' >>"$log.speed"
    ib_pair ib_write_lat -s 8 -n 500 | awk '/^ *8 / {print "ib_write_lat 8_B", $5, "us"}' >>"$log.speed"
    ib_pair ib_write_lat -s 4096 -n 500 | awk '/^ *4096 / {print "ib_write_lat 4_KiB", $5, "us"}' >>"$log.speed"
  done
  sort -k2,2 -k1,1 -k3,3n "$log.speed" | awk '{key = $2 " " $1; if (key != last) n = 0; last = key; if (++n == 2) printf "  %-6s %-16s %9.1f %s\n", $2, $1, $3, $4}'
}
# A server on the first device and a client on the second; what the client says.
ib_pair() {
  local tool=$1 server
  shift
  timeout 120 "$tool" -d rxe0 -F "$@" >/dev/null 2>&1 &
  server=$!
  sleep 5
  timeout 120 "$tool" -d rxe1 -F "$@" 10.77.0.1 2>/dev/null
  wait "$server"
}

for part in "${parts[@]}"; do "part_$part"; done
exit $failed
