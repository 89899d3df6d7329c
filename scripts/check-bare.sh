#!/usr/bin/env bash
# Proves that a bare Debian 12 is enough: makes a minimal system with debootstrap, clones HEAD into it, installs only
# make, git and ca-certificates there, and times `make demo` and `make test`.
# Usage (as root): check-bare.sh [DIR]
#   DIR  where the system lives; it is kept, and used again when it is there already (with what was installed then).
#        Without DIR: a temporary folder, removed at the end.
# The system inside uses apt as this one does: same sources, same proxy, same trust.
set -euo pipefail

fail() {
  echo "check-bare: $1" >&2
  exit 2
}

[[ $EUID -eq 0 ]] || fail "chroot and debootstrap need root"
command -v apt-get >/dev/null || fail "this needs a Debian system: it takes its apt sources from there"
repo=$(git -C "$(dirname "$0")/.." rev-parse --show-toplevel)
git -C "$repo" rev-parse -q --verify HEAD >/dev/null || fail "$repo has no commit to clone"
if [[ -n $(git -C "$repo" status --porcelain) ]]; then
  echo "check-bare: $repo has uncommitted changes, which are not part of the check" >&2
fi

if [[ $# -ge 1 ]]; then
  mkdir -p "$1"
  root=$(realpath "$1")
  temporary=false
else
  root=$(mktemp -d)
  chmod 755 "$root"  # apt drops its rights to download
  temporary=true
fi
case $root/ in "$repo"/*) fail "$root is inside the source tree" ;; esac

cleanup() {
  local mounted
  for mounted in dev/shm dev/pts dev proc; do
    if mountpoint -q "$root/$mounted"; then umount "$root/$mounted"; fi
  done
  if $temporary; then rm -rf --one-file-system "$root"; fi
}
trap cleanup EXIT

times=()
timed() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@"
  times+=("$(printf '%-22s %5d s' "$name" $((SECONDS - start)))")
}

# Copies files and folders of the host to the same place inside, those that are there.
copy_in() {
  local path
  for path in "$@"; do
    [[ -e $path ]] || continue
    mkdir -p "$root$(dirname "$path")"
    rm -rf "${root:?}$path"
    cp -aL "$path" "$root$path"
  done
}

# Sources, pins and keys are copied. Of the settings only how to reach and trust the sources: hooks would call programs
# that a bare system lacks.
copy_apt_configuration() {
  # debootstrap has written a list of its own.
  rm -f "$root/etc/apt/sources.list"
  copy_in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/preferences.d /etc/apt/auth.conf /etc/apt/auth.conf.d \
    /etc/apt/trusted.gpg /etc/apt/trusted.gpg.d /etc/apt/keyrings /usr/share/keyrings /usr/local/share/ca-certificates \
    /etc/ssl/certs/ca-certificates.crt /etc/resolv.conf /etc/hosts
  apt-config dump | grep '^Acquire::' | tee "$root/etc/apt/apt.conf.d/99host" |
    { grep -iE '::(CaInfo|CaPath|SslCert|SslKey) ' || true; } | cut -d '"' -f 2 |
    while read -r file; do copy_in "$file"; done
}

# The mirror of the main archive of Debian 12, as this system's apt knows it.
find_mirror() {
  local mirror
  mirror=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
    awk '$1 == "bookworm" && $2 == "main" {print $3; exit}')
  [[ -n $mirror ]] || fail "this system's apt has no source for Debian 12 (bookworm) main, or needs 'apt-get update'"
  echo "$mirror"
}

make_system() {
  local mirror
  mirror=$(find_mirror)
  command -v debootstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends \
    debootstrap </dev/null
  debootstrap --variant=minbase bookworm "$root" "$mirror" >"$root.log" 2>&1 || {
    tail -n 30 "$root.log" "$root/debootstrap/debootstrap.log" >&2 || true
    fail "debootstrap failed"
  }
  rm -f "$root.log"
}

mount_system() {
  mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
  mountpoint -q "$root/dev" || mount --bind /dev "$root/dev"
  mountpoint -q "$root/dev/pts" || mount --bind /dev/pts "$root/dev/pts"
  # Not this system's: tests may leave things in it.
  mountpoint -q "$root/dev/shm" || mount -t tmpfs tmpfs "$root/dev/shm"
}

# Runs a command inside with a clean environment, save for the proxies, and without a terminal.
inside() {
  local name environment=(HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
  for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    if [[ -n ${!name:-} ]]; then environment+=("$name=${!name}"); fi
  done
  env -i "${environment[@]}" setsid -w chroot "$root" bash -c "$1" </dev/null
}

install_first_packages() {
  inside 'apt-get -q update && DEBIAN_FRONTEND=noninteractive \
    apt-get -q install -y --no-install-recommends make git ca-certificates'
}

clone_head() {
  rm -rf "${root:?}/root/mkernel"
  git clone -q --no-local "$repo" "$root/root/mkernel"
  chown -R root: "$root/root/mkernel"
}

if [[ ! -x $root/bin/bash ]]; then timed "debootstrap" make_system; fi
copy_apt_configuration
mount_system
timed "apt: make, git" install_first_packages
clone_head
timed "make demo" inside 'cd /root/mkernel && make demo'
timed "make test" inside 'cd /root/mkernel && make test'

echo "== $(git -C "$repo" rev-parse --short HEAD) on a bare Debian $(cat "$root/etc/debian_version"), $(nproc) cores"
printf '%s\n' "${times[@]}"
