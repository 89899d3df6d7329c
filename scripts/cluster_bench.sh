#!/usr/bin/env bash
# Proves, measures and checks mKernel on the hosts of a job, and writes one JSON file: plans (mkernel verify), what each
# host has (mkernel info), the network between two ranks, and every operator with its result checked.
# Usage: cluster_bench.sh [options]
#   -N NODES        default: those of the SLURM job, else 2
#   -g GPUS         ranks per node, default 1
#   -t NETWORK      libfabric, verbs, verbs-counted or efa; default libfabric
#   -d DEVICE       host or cuda; default cuda where nvidia-smi lists a GPU, else host
#   -l LAUNCHER     srun, mpirun or torchrun; default: the first that is there, srun only within a SLURM job
#   -a "OPTIONS"    more options for the launcher: -a "--hostfile hosts", -a "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
#   -A HOST         where rank 0 runs, for mpirun over several hosts
#   -s "M,N,K ..."  shapes; default 4096,4096,4096 and 8192,8192,8192 on GPUs, 512,512,512 on the host
#   -r COUNT        timed runs of each, default 5
#   -b FOLDER       with mkernel and net_conformance_test, on all hosts; default build/cpu
#   -o FILE         default cluster_bench.json
#   -P              does not prove the plans again, which takes a minute
#   -n              prints the commands and runs none
# torchrun over several hosts: run this on each of them, with -a saying how they meet; that of rank 0 writes results.
# Exit code: 0 when all is good, 1 when something failed (the JSON says what), 2 for bad arguments.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd -P)
nodes=${SLURM_JOB_NUM_NODES:-2} gpus=1 network=libfabric device='' launcher='' more='' address='' shapes='' repeat=5
build=$root/build/cpu out=cluster_bench.json prove=1 dry=''
usage() {
  sed -n '2,21s/^# //p' "$0" >&2
  [[ $# -eq 0 ]] || echo "cluster_bench: $*" >&2
  exit 2
}
while getopts N:g:t:d:l:a:A:s:r:b:o:Pn option; do
  case $option in
    N) nodes=$OPTARG ;;
    g) gpus=$OPTARG ;;
    t) network=$OPTARG ;;
    d) device=$OPTARG ;;
    l) launcher=$OPTARG ;;
    a) more=$OPTARG ;;
    A) address=$OPTARG ;;
    s) shapes=$OPTARG ;;
    r) repeat=$OPTARG ;;
    b) build=$OPTARG ;;
    o) out=$OPTARG ;;
    P) prove='' ;;
    n) dry=1 ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[[ $# -eq 0 ]] || usage "unknown argument $1"
[[ $nodes =~ ^[1-9][0-9]*$ ]] || usage "-N must be a number"
[[ $gpus =~ ^[1-9][0-9]*$ ]] || usage "-g must be a number"
[[ $repeat =~ ^[1-9][0-9]*$ ]] || usage "-r must be a number"
[[ $network =~ ^(libfabric|verbs|verbs-counted|efa)$ ]] || usage "-t must be libfabric, verbs, verbs-counted or efa"
if [[ -z $device ]]; then
  device=host
  [[ -z $(nvidia-smi -L 2>/dev/null) ]] || device=cuda
fi
[[ $device =~ ^(host|cuda)$ ]] || usage "-d must be host or cuda"
if [[ -z $launcher ]]; then
  for each in ${SLURM_JOB_ID:+srun} mpirun torchrun; do
    if command -v "$each" >/dev/null; then
      launcher=$each
      break
    fi
  done
fi
[[ $launcher =~ ^(srun|mpirun|torchrun)$ ]] || usage "there is no srun (within a job), mpirun or torchrun; -l names one"
[[ -n $shapes ]] || { [[ $device == cuda ]] && shapes='4096,4096,4096 8192,8192,8192' || shapes=512,512,512; }
for shape in $shapes; do [[ $shape =~ ^[0-9]+,[0-9]+,[0-9]+$ ]] || usage "-s: '$shape' is no M,N,K"; done
[[ -n $dry || -x $build/mkernel ]] || usage "$build/mkernel is not there: make build, or -b"

log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
export MKERNEL_NETWORK=$network
[[ -z $address ]] || export MKERNEL_ADDRESS=$address

# launched NODES PER_NODE COMMAND...: sets `command` to what starts it there.
launched() {
  local nodes=$1 each=$2
  local -a extra
  shift 2
  read -r -a extra <<<"$more" || true
  case $launcher in
    srun) command=(srun -N "$nodes" -n $((nodes * each)) "--ntasks-per-node=$each" "${extra[@]}" "$@") ;;
    mpirun)
      command=(mpirun -np $((nodes * each)))
      # With one host all ranks are on it, whatever they stand for.
      [[ -z $address ]] || command+=(--map-by "ppr:$each:node" -x MKERNEL_ADDRESS)
      command+=(-x MKERNEL_NETWORK "${extra[@]}" "$@")
      ;;
    torchrun)
      command=(torchrun --nnodes "$nodes" --nproc-per-node "$each")
      [[ -n $more ]] || command=(torchrun --standalone --nproc-per-node $((nodes * each)))
      command+=("${extra[@]}" --no-python "$@")
      ;;
  esac
}
# A text as a JSON string.
quoted() { printf '"%s"' "$(tr -d '\000-\010\013-\037' <<<"$1" | sed 's/\\/\\\\/g; s/"/\\"/g; s/\t/ /g' | sed ':a;N;$!ba;s/\n/\\n/g')"; }

failed=0
first=1
# step NAME [json] COMMAND...: runs it, and adds an entry with its output: an object as it is, or lines of text.
step() {
  local name=$1 kind=$2 begin=$SECONDS code=0
  shift 2
  if [[ -n $dry ]]; then
    echo "$name: ${*@Q}"
    return
  fi
  echo "$name ..." >&2
  "$@" >"$log/out" 2>"$log/err" || code=$?
  [[ $code -eq 0 ]] || { failed=1; tail -n 5 "$log/err" >&2; }
  [[ -n $first ]] || echo "," >>"$out"
  first=''
  {
    printf '{"step": %s, "command": %s, "exit_code": %d, "seconds": %d, ' "$(quoted "$name")" "$(quoted "$*")" $code $((SECONDS - begin))
    if [[ $kind == json && $code -eq 0 ]]; then
      printf '"result": '
      cat "$log/out"
    else
      printf '"output": %s, "errors": %s' "$(quoted "$(tail -n 100 "$log/out")")" "$(quoted "$(tail -n 20 "$log/err")")"
    fi
    printf '}\n'
  } >>"$out"
}

if [[ -z $dry ]]; then
  printf '{"nodes": %d, "gpus": %d, "network": "%s", "device": "%s", "launcher": "%s", "date": "%s", "steps": [\n' \
    "$nodes" "$gpus" "$network" "$device" "$launcher" "$(date -u +%FT%TZ)" >"$out"
fi
[[ -z $prove ]] || step "plans" text "$build/mkernel" verify all
launched "$nodes" 1 "$build/mkernel" info --json
step "what the hosts have" text "${command[@]}"
kinds=$network
case $network in
  libfabric) kinds=libfabric_tcp1 ;;
  verbs-counted) kinds=verbs_counted1 ;;
  efa) kinds='' ;;  # the measurement knows no EFA yet
esac
if [[ -n $kinds && (-n $dry || -x $build/net_conformance_test) ]]; then
  step "the contract, within this host" text "$build/net_conformance_test" "--gtest_filter=*ConformanceTest*/$kinds"
  if [[ $nodes -gt 1 ]]; then
    launched 2 1 "$build/net_conformance_test" "--gtest_filter=*Speed*/$kinds"
    step "latency and bandwidth between two nodes" text "${command[@]}"
  fi
fi
for shape in $shapes; do
  IFS=, read -r m n k <<<"$shape"
  for op in all_gather_gemm gemm_reduce_scatter gemm_all_reduce; do
    launched "$nodes" "$gpus" "$build/mkernel" run "$op" --nodes "$nodes" --gpus "$gpus" --m "$m" --n "$n" --k "$k" \
      --device "$device" --repeat "$repeat" --json
    step "$op $m x $n x $k" json "${command[@]}"
  done
done
[[ -n $dry ]] || { printf '], "ok": %s}\n' "$([[ $failed -eq 0 ]] && echo true || echo false)" >>"$out"; echo "$out" >&2; }
exit $failed
