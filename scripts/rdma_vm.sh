#!/usr/bin/env bash
# Runs a command in a virtual machine that has two RDMA devices in software (rdma_rxe), on machines that have neither
# RDMA nor KVM. Usage: rdma_vm.sh [-o FOLDER] COMMAND [ARGUMENTS...]
#   -o FOLDER   what the command writes below $RDMA_VM_OUT lies there afterwards
# The machine sees all files of this one at their places; what it writes vanishes with it. Its devices are rxe0 on va0
# (10.77.0.1) and rxe1 on vb0 (10.77.0.2), the two ends of a cable. Output and exit code are the command's.
# Exit code 77: what it needs is missing and cannot be installed, and it says what. 124: it took longer than
# RDMA_VM_SECONDS (1800). 125: the machine did not start or did not end in order.
# RDMA_VM_MEMORY (5G) and RDMA_VM_CORES (2) are its size. Downloads a Debian kernel (70 MB) once, into build/rdma-vm.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd -P)
cache=$root/build/rdma-vm
modules=(9p 9pnet_virtio virtio_pci virtio_console overlay veth sch_netem crc32_generic rdma_rxe)

skip() {
  echo "SKIPPED: $*" >&2
  exit 77
}

out=
if [[ ${1:-} == -o ]]; then
  mkdir -p "$2"
  out=$(cd "$2" && pwd -P)
  shift 2
fi
[[ $# -gt 0 ]] || { sed -n '2,11s/^# //p' "$0" >&2; exit 125; }

need() {
  local program package missing=()
  for program in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static rdma:iproute2 xz:xz-utils; do
    package=${program#*:}
    command -v "${program%%:*}" >/dev/null || missing+=("$package")
  done
  [[ -e /usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so ]] || missing+=(ibverbs-providers)
  [[ ${#missing[@]} -gt 0 ]] || return 0
  "$root/scripts/bootstrap.sh" "${missing[@]}" >&2 || skip "no virtual machine with RDMA: ${missing[*]} cannot be installed"
}

# The kernel as QEMU starts it, and an initial file system of busybox and the modules that are needed.
prepare() {
  local work=$cache/work package version start tree module
  [[ ! -e $cache/ready || $(<"$cache/ready") != "${modules[*]}" ]] || return 0
  rm -rf "$work"
  mkdir -p "$work/package" "$work/tree/bin"
  chmod 755 "$work"
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-[0-9]/ {print $2; exit}')
  [[ -n $package ]] || skip "no virtual machine with RDMA: apt knows no linux-image-amd64 (Debian's; apt-get update)"
  echo "fetching $package" >&2
  (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$package" >&2) || skip "no virtual machine with RDMA: $package cannot be downloaded"
  dpkg -x "$work"/*.deb "$work/package"
  version=${package#linux-image-}
  # QEMU can start the unpacked kernel; unpacking it in the machine would take longer than all else.
  start=$(LC_ALL=C grep -abo -m1 $'\xfd7zXZ' "$work/package/boot/vmlinuz-$version" | head -n1 | cut -d: -f1)
  tail -c "+$((start + 1))" "$work/package/boot/vmlinuz-$version" | xz -dc --single-stream >"$cache/kernel" 2>/dev/null || true
  [[ $(head -c4 "$cache/kernel" | tail -c3) == ELF ]] || skip "no virtual machine with RDMA: $package has another format"

  tree=$work/tree
  # All modules, so that depmod sees what depends on what; then only those that are wanted.
  busybox depmod -b "$work/package" "$version" 2>/dev/null
  mkdir -p "$tree/lib/modules/$version"
  cp "$work/package/lib/modules/$version"/modules.* "$tree/lib/modules/$version/"
  for module in "${modules[@]}"; do
    awk -v name="$module" '{path = $1; sub(/:$/, "", path); base = path; sub(/.*\//, "", base); sub(/\.ko.*/, "", base)
      gsub(/-/, "_", base); if (base == name) {print path; for (i = 2; i <= NF; ++i) print $i}}' \
      "$work/package/lib/modules/$version/modules.dep"
  done | sort -u | while read -r module; do
    mkdir -p "$tree/lib/modules/$version/$(dirname "$module")"
    cp "$work/package/lib/modules/$version/$module" "$tree/lib/modules/$version/$module"
  done
  cp "$(command -v busybox)" "$tree/bin/busybox"
  rm -rf "$cache/tree"
  mv "$tree" "$cache/tree"
  rm -rf "$work"
  echo "${modules[*]}" >"$cache/ready"
}

need
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
prepare
exec 9>&-

# How the machine and we talk: a folder that both see.
talk=$(mktemp -d "$cache/run.XXXXXX")
trap 'rm -rf "$talk"' EXIT
mkdir "$talk/out"
cp -r "$cache/tree" "$talk/tree"
cp "$root/scripts/rdma_vm_init.sh" "$talk/tree/init"
printf '%s\n' "${modules[@]}" >"$talk/tree/modules"
(cd "$talk/tree" && find . | busybox cpio -o -H newc 2>/dev/null) >"$talk/tree.cpio"
rm -rf "$talk/tree"
{
  export -p
  printf 'export RDMA_VM_OUT=%q\ncd %q\n' "$talk/out" "$PWD"
  printf '%q ' "$@"
} >"$talk/command"

model=none
[[ $(id -u) -ne 0 ]] || model=passthrough
status=0
# no_timer_check: on a busy host the kernel's test of its timer takes too long, and it gives up.
# -cpu max has AVX2, but QEMU 7.2 has no AVX-512 on any: programs built for this machine's own instructions end there.
timeout -k 5 "${RDMA_VM_SECONDS:-1800}" qemu-system-x86_64 -M q35 -accel tcg,thread=multi -cpu max \
  -smp "${RDMA_VM_CORES:-2}" -m "${RDMA_VM_MEMORY:-5G}" -nodefaults -no-user-config -display none -no-reboot \
  -kernel "$cache/kernel" -initrd "$talk/tree.cpio" \
  -append "console=ttyS0 loglevel=4 panic=-1 reboot=t nokaslr mitigations=off no_timer_check tsc=reliable cryptomgr.notests talk=$talk" \
  -serial "file:$talk/console" -device virtio-serial-pci -chardev "stdio,id=out,signal=off" -device virtconsole,chardev=out \
  -fsdev "local,id=all,path=/,security_model=$model,readonly=on,multidevs=remap" \
  -device virtio-9p-pci,fsdev=all,mount_tag=all \
  -fsdev "local,id=talk,path=$talk,security_model=$model" -device virtio-9p-pci,fsdev=talk,mount_tag=talk \
  </dev/null || status=$?
[[ -z $out ]] || cp -r "$talk/out/." "$out/"
if [[ $status -eq 124 || $status -eq 137 ]]; then
  echo "rdma_vm: no end within ${RDMA_VM_SECONDS:-1800} s" >&2
  exit 124
fi
if [[ ! -s $talk/status ]]; then
  tail -n 30 "$talk/console" >&2
  echo "rdma_vm: the virtual machine ended without an exit code (QEMU: $status); above is its console" >&2
  exit 125
fi
exit "$(<"$talk/status")"
