#!/usr/bin/env bash
# Prints where this machine's GPUs and RDMA cards are, in the form of tests/machines/*.txt: what the choice of cards
# reads from /sys and nothing else. Send the output when `mkernel info` chooses badly on your machine.
# Usage: record_machine.sh [--gids] [SYSFS]
#   --gids   with the ports' GIDs, which contain IP or hardware addresses
set -euo pipefail
gids=
if [[ ${1:-} == --gids ]]; then
  gids=1
  shift
fi
if [[ ${1:-} == -* || $# -gt 1 ]]; then
  sed -n '2,6s/^# //p' "$0" >&2
  exit 2
fi
sys=${1:-/sys}

line() { cat "$1" 2>/dev/null || true; }
# What the real path has below /sys/devices, from the host bridge on; empty for what is no PCI device.
pci_path() {
  local path
  path=$(readlink -f "$1" 2>/dev/null) || return 0
  [[ $path == */pci[0-9a-f]*:* ]] && printf 'pci%s\n' "${path#*/pci}"
  return 0
}

echo "# $(uname -sr), $(date -u +%F)"
for device in "$sys"/bus/pci/devices/*; do
  [[ $(line "$device/vendor") == 0x10de && $(line "$device/class") == 0x0302* ]] ||
    [[ $(line "$device/vendor") == 0x10de && $(line "$device/class") == 0x0300* ]] || continue
  echo "gpu $(pci_path "$device") numa $(line "$device/numa_node") class $(line "$device/class")"
done
for card in "$sys"/class/infiniband/*; do
  [[ -d $card/ports ]] || continue
  path=$(pci_path "$card/device")
  numa=$(line "$card/device/numa_node")
  echo "rdma ${card##*/} ${path:--} numa ${numa:--1}"
  for port in "$card"/ports/*; do
    echo "port ${card##*/} ${port##*/} $(line "$port/state" | sed 's/^[0-9]*: *//') $(line "$port/link_layer")"
    [[ -n $gids ]] || continue
    for gid in "$port"/gids/*; do
      value=$(line "$gid")
      [[ -n $value && $value != 0000:0000:0000:0000:0000:0000:0000:0000 ]] || continue
      index=${gid##*/}
      echo "gid ${card##*/} ${port##*/} $index $value $(line "$port/gid_attrs/ndevs/$index") $(line "$port/gid_attrs/types/$index")"
    done
  done
done
