#!/usr/bin/env bash
# Our puts over libfabric's tcp beside the tools of the network itself, in turn, on the loopback: fi_pingpong (half a
# round trip) and iperf3 (one way). Wants libfabric-bin and iperf3; 77 where they are not.
# Usage: tcp_speed.sh [ROUNDS] (default 5), after `make test`; BUILD names another build folder.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${BUILD:-build/cpu}/net_conformance_test
port=52990
for tool in fi_pingpong iperf3 "$program"; do
  command -v "$tool" >/dev/null || { echo "SKIPPED: there is no $tool" >&2; exit 77; }
done

pingpong() { # BYTES ITERATIONS
  local options=(-p 'tcp;ofi_rxm' -e rdm -S "$1" -I "$2")
  fi_pingpong "${options[@]}" >/dev/null 2>&1 &
  sleep 0.5
  fi_pingpong "${options[@]}" 127.0.0.1 | awk -v bytes="$1" 'END {printf "fi_pingpong  %d B: %.1f us, %.0f MB/s\n", bytes, $(NF - 1), $(NF - 2)}'
  wait
}
for ((round = 0; round < ${1:-5}; ++round)); do
  "$program" --gtest_filter='*NetworkSpeedTest*libfabric_tcp1' 2>/dev/null | grep 'MB/s'
  pingpong 8 2000
  pingpong 4096 2000
  pingpong 1048576 500
  iperf3 -s -1 -p $port >/dev/null 2>&1 &
  sleep 0.5
  iperf3 -c 127.0.0.1 -p $port -t 2 -f M | awk '/receiver/ {printf "iperf3  %s MB/s (MiB of 2^20 bytes)\n", $(NF - 2)}'
  wait
done
