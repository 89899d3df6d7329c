#!/usr/bin/env bash
# Runs a command once on each of several emulated hosts: network namespaces on one switch, each with a name of its own
# (n0, n1, ...) and two interfaces, data0 (10.99.0.1 and up), whose link is paced, and mgmt0 (10.88.0.1 and up). The
# environment is that of a launcher. Needs root, ip and tc; leaves nothing behind, whatever ends it.
# Usage: namespaces.sh [-n HOSTS] [-r RATE] [-l torchrun|srun] [-m data|mgmt] [-d HOST:SECONDS] [-b] COMMAND [ARGUMENTS...]
#   -n HOSTS           default 2
#   -r RATE            of data0, as tc writes it; default 1gbit
#   -l LAUNCHER        whose variables are set; default torchrun
#   -m data|mgmt       network of rank 0's address; default data
#   -d HOST:SECONDS    data0 of that host goes down so long after the start
#   -b                 prints the bytes that each host has sent on each interface
# Output is rank 0's; what all say of errors is theirs. The exit code is the highest. 77: this machine cannot.
set -euo pipefail

hosts=2 rate=1gbit launcher=torchrun meet=data down='' bytes=''
usage() {
  sed -n '2,14s/^# //p' "$0" >&2
  exit 2
}
if [[ ${MKERNEL_IN_NAMESPACE:-} != 1 ]]; then
  if [[ $(id -u) -ne 0 ]] || ! command -v ip >/dev/null || ! command -v tc >/dev/null || ! unshare -nm true 2>/dev/null; then
    echo "SKIPPED: namespaces need root, ip and tc (iproute2)" >&2
    exit 77
  fi
  MKERNEL_IN_NAMESPACE=1 exec unshare -nm --propagation private "$0" "$@"
fi
while getopts n:r:l:m:d:b option; do
  case $option in
    n) hosts=$OPTARG ;;
    r) rate=$OPTARG ;;
    l) launcher=$OPTARG ;;
    m) meet=$OPTARG ;;
    d) down=$OPTARG ;;
    b) bytes=1 ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[[ $# -gt 0 && $hosts =~ ^[0-9]+$ && $meet =~ ^(data|mgmt)$ && $launcher =~ ^(torchrun|srun)$ ]] || usage

# All of this is seen by nobody outside.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p /run/netns
mount -t tmpfs none /run/netns
echo "127.0.0.1 localhost" >"$work/hosts"
for ((i = 0; i < hosts; ++i)); do echo "10.$([[ $meet == data ]] && echo 99 || echo 88).0.$((i + 1)) n$i" >>"$work/hosts"; done
mount --bind "$work/hosts" /etc/hosts
can() { "$@" 2>"$work/why" || { echo "SKIPPED: this kernel cannot: $* ($(<"$work/why"))" >&2; exit 77; }; }
ip link set lo up
for network in data mgmt; do
  can ip link add "$network" type bridge
  ip link set "$network" up
done
for ((i = 0; i < hosts; ++i)); do
  can ip netns add "n$i"
  ip -n "n$i" link set lo up
  for network in data mgmt; do
    can ip link add "$network$i" type veth peer name "${network}0" netns "n$i"
    ip link set "$network$i" master "$network" up
    ip -n "n$i" address add "10.$([[ $network == data ]] && echo 99 || echo 88).0.$((i + 1))/24" dev "${network}0"
    ip -n "n$i" link set "${network}0" up
  done
  # A millisecond of burst: more would let small runs go by unpaced.
  can tc -n "n$i" qdisc add dev data0 root tbf rate "$rate" burst 128k latency 100ms
done

address=10.$([[ $meet == data ]] && echo 99 || echo 88).0.1
run=$$.$(date +%s%N)
# What torchrun --nnodes HOSTS --nproc-per-node 1 sets (torch.distributed.elastic 2.x), or srun -N HOSTS -n HOSTS.
variables() {
  local i=$1
  if [[ $launcher == torchrun ]]; then
    echo "RANK=$i WORLD_SIZE=$hosts LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=$i GROUP_WORLD_SIZE=$hosts ROLE_RANK=$i
      ROLE_WORLD_SIZE=$hosts ROLE_NAME=default MASTER_ADDR=$address MASTER_PORT=29500 TORCHELASTIC_RESTART_COUNT=0
      TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RUN_ID=$run TORCHELASTIC_USE_AGENT_STORE=True OMP_NUM_THREADS=1"
  else
    echo "SLURM_JOB_ID=${run%%.*} SLURM_STEP_ID=0 SLURM_PROCID=$i SLURM_LOCALID=0 SLURM_NODEID=$i SLURM_NTASKS=$hosts
      SLURM_STEP_NUM_TASKS=$hosts SLURM_STEP_NUM_NODES=$hosts SLURM_STEP_NODELIST=n[0-$((hosts - 1))]
      SLURM_JOB_NODELIST=n[0-$((hosts - 1))] SLURMD_NODENAME=n$i SLURM_STEP_TASKS_PER_NODE=1(x$hosts)"
  fi
}
pids=()
for ((i = 0; i < hosts; ++i)); do
  read -r -d '' -a set < <(variables "$i") || true
  # shellcheck disable=SC2016
  env -u MKERNEL_IN_NAMESPACE "${set[@]}" ip netns exec "n$i" unshare -u bash -c 'hostname "$0" && exec "$@"' "n$i" "$@" \
    >"$work/out$i" 2>"$work/err$i" &
  pids+=($!)
done
if [[ -n $down ]]; then
  sleep "${down#*:}"
  ip -n "n${down%%:*}" link set data0 down
fi
code=0
for pid in "${pids[@]}"; do
  status=0
  wait "$pid" || status=$?
  ((status > code)) && code=$status
done
cat "$work/out0"
for ((i = 0; i < hosts; ++i)); do cat "$work/err$i" >&2; done
if [[ -n $bytes ]]; then
  for ((i = 0; i < hosts; ++i)); do
    # shellcheck disable=SC2016
    ip netns exec "n$i" awk -v host="n$i" -F'[: ]+' '/(data|mgmt)0:/ {print "sent", host, $2, $11}' /proc/net/dev
  done
fi
exit "$code"
