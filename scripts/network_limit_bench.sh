#!/usr/bin/env bash
# Fused against unfused operators over libfabric's tcp between two emulated hosts (scripts/namespaces.sh), beside what
# iperf3 and fi_pingpong say of the same link in the same minute. Prints a table. Needs root, tc, iperf3, fi_pingpong
# (libfabric-bin) and an idle machine: four threads want to compute.
# Usage: network_limit_bench.sh [-r RATE] [-n REPEAT] [-s OP:M:N:K]... BUILD_FOLDER
#   -r RATE      of the link, as tc writes it; default 1gbit
#   -n REPEAT    calls of each kind, fused and unfused in turn; default 7
#   -s OP:M:N:K  what runs; default: each operator at a shape whose arithmetic takes about as long as its bytes do, on
#                two cores of an AMD EPYC at 1 Gbit/s
# Exit code 77: this machine cannot.
set -euo pipefail

rate=1gbit repeat=7 shapes=()
while getopts r:n:s: option; do
  case $option in
    r) rate=$OPTARG ;;
    n) repeat=$OPTARG ;;
    s) shapes+=("$OPTARG") ;;
    *) sed -n '2,11s/^# //p' "$0" >&2; exit 2 ;;
  esac
done
shift $((OPTIND - 1))

# The part of one host, within namespaces.sh.
if [[ ${MKERNEL_LIMIT_HOST:-} == 1 ]]; then
  mkernel=$1 repeat=$2
  shift 2
  say() { [[ $RANK -ne 0 ]] || printf "$@"; }
  if [[ $RANK -eq 1 ]]; then
    iperf3 -s -1 >/dev/null
    fi_pingpong -p tcp -e rdm -S 8 -I 2000 >/dev/null 2>&1 || true
  else
    for ((try = 0; try < 50; ++try)); do
      bits=$(iperf3 -c 10.99.0.2 -t 4 -J 2>/dev/null |
        awk '/"sum_received"/ {inside = 1} inside && /"bits_per_second"/ {gsub(/[^0-9.e+]/, "", $2); print $2; exit}') || true
      [[ -z $bits ]] || break
      sleep 0.2
    done
    sleep 1
    latency=$(fi_pingpong -p tcp -e rdm -S 8 -I 2000 10.99.0.2 2>/dev/null | awk 'END {print $(NF - 1)}') || true
    printf 'iperf3 %.1f Mbit/s of payload; fi_pingpong 8 B %s us\n' "$(awk "BEGIN {print ${bits:-0} / 1e6}")" "${latency:-?}"
    printf '%-22s %18s %10s %10s %10s %8s %12s\n' operator 'M x N x K' 'limit ms' 'fused ms' 'unfused ms' ratio 'fused/limit'
  fi
  for shape in "$@"; do
    IFS=: read -r op m n k <<<"$shape"
    report=$("$mkernel" run "$op" --nodes 2 --m "$m" --n "$n" --k "$k" --repeat "$repeat" --compare --json 2>/dev/null)
    [[ $RANK -eq 0 ]] || continue
    values=$(awk '/"fused": {/ {in_fused = 1} /"unfused": {/ {in_fused = 0}
      /"median_us"/ {gsub(/[^0-9.]/, ""); if (in_fused) fused = $0; else unfused = $0}
      /"bytes_per_gpu"/ {gsub(/[^0-9.]/, "", $2); bytes = $2} END {print fused, unfused, bytes}' <<<"$report")
    read -r fused unfused bytes <<<"$values"
    awk -v op="$op" -v shape="$m x $n x $k" -v fused="$fused" -v unfused="$unfused" -v bytes="$bytes" -v bits="$bits" \
      'BEGIN {limit = bytes * 8 / bits * 1e3; printf "%-22s %18s %10.1f %10.1f %10.1f %8.2f %12.2f\n", op, shape, limit,
        fused / 1e3, unfused / 1e3, unfused / fused, fused / 1e3 / limit}'
  done
  exit 0
fi

[[ $# -eq 1 && -x $1/mkernel ]] || { sed -n '2,11s/^# //p' "$0" >&2; exit 2; }
for tool in iperf3 fi_pingpong; do
  command -v "$tool" >/dev/null || { echo "SKIPPED: there is no $tool" >&2; exit 77; }
done
[[ ${#shapes[@]} -gt 0 ]] || shapes=(ag_gemm:4096:320:4096 gemm_rs:4096:2048:320 gemm_ar:2048:2048:640)
MKERNEL_LIMIT_HOST=1 "$(dirname "$0")/namespaces.sh" -n 2 -r "$rate" "$(realpath "$0")" "$(realpath "$1/mkernel")" "$repeat" \
  "${shapes[@]}"
