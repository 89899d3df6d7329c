#!/bin/busybox sh
# Process 1 of the virtual machine of rdma_vm.sh: mounts this machine's files, makes the RDMA devices, runs the command.
/bin/busybox mkdir -p /bin /proc /sys /dev /all /over /new
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev

give_up() {
  echo "rdma_vm: $*" >/dev/console
  sync
  reboot -f
}
while read -r module; do
  modprobe "$module" || give_up "no module $module"
done </modules
talk=$(sed 's/.*talk=\([^ ]*\).*/\1/' /proc/cmdline)

# Everything is read from the host and written to memory, but for the folder of the talk.
options=trans=virtio,version=9p2000.L,msize=262144
mount -t 9p -o "ro,cache=loose,$options" all /all || give_up "cannot see the host's files"
mount -t tmpfs -o size=60% over /over
mkdir /over/upper /over/work
mount -t overlay -o lowerdir=/all,upperdir=/over/upper,workdir=/over/work overlay /new || give_up "no overlay"
for folder in proc sys dev run tmp; do mkdir -p "/new/$folder"; done
mount -t proc proc /new/proc
mount -t sysfs sys /new/sys
mount -t devtmpfs dev /new/dev
mount -t tmpfs run /new/run
mkdir -p /new/dev/shm /new/dev/pts
mount -t tmpfs shm /new/dev/shm
mount -t devpts pts /new/dev/pts
for link in fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do
  target=${link#*:}
  [ "$target" = "$link" ] && target=
  ln -sf "/proc/self/${target:-fd}" "/new/dev/${link%%:*}"
done
mount -t 9p -o "$options" talk "/new$talk" || give_up "cannot see $talk"

# Both ends of the cable are in one network namespace, since rxe knows only the first. So the kernel must take packets
# from its own addresses off the cable, and answer for an address only at the end that has it.
for scope in all default; do
  for setting in accept_local=1 rp_filter=0 arp_ignore=1 arp_announce=2; do
    echo "${setting#*=}" >"/proc/sys/net/ipv4/conf/$scope/${setting%=*}"
  done
done
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
in_new() { chroot /new "$@" || give_up "failed: $*"; }
in_new /bin/ip link set lo up
# 4200 bytes make the RDMA devices' packets 4096.
in_new /bin/ip link add va0 mtu 4200 type veth peer name vb0 mtu 4200
number=1
for device in va0 vb0; do
  in_new /bin/ip link set "$device" up
  in_new /bin/ip address add "10.77.0.$number/24" dev "$device"
  in_new /usr/bin/rdma link add "rxe$((number - 1))" type rxe netdev "$device"
  number=$((number + 1))
done
hostname rdma-vm
ulimit -l unlimited

stty -F /dev/hvc0 raw 2>/dev/null
chroot /new /bin/bash "$talk/command" </dev/null >/dev/hvc0 2>&1
echo $? >"/new$talk/status"
sync
reboot -f
