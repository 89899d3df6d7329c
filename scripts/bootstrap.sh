#!/usr/bin/env bash
# Installs what the build needs and this machine lacks. Usage: bootstrap.sh [further Debian packages...]
# Asks no network when nothing is missing. Exit code 2: something is missing and cannot be installed from here.
set -euo pipefail

packages=(build-essential g++ cmake ninja-build libeigen3-dev libcli11-dev libfmt-dev nlohmann-json3-dev
  libgtest-dev pkg-config libfabric-dev libibverbs-dev "$@")
# Without these there are no worlds of several processes, or no RDMA between them, and everything else works.
optional=(pkg-config libfabric-dev libibverbs-dev)

is_optional() { [[ " ${optional[*]} " == *" $1 "* ]]; }

is_installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

# Can the compiler include one of these headers?
has_header() {
  local header code=''
  for header in "$@"; do code+=" || __has_include(<$header>)"; done
  printf '#if !(0%s)\n#error missing\n#endif\n' "$code" | "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null
}

# Is what a package brings there all the same, from another source?
is_usable() {
  case $1 in
    build-essential | g++) "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - </dev/null 2>/dev/null ;;
    cmake) cmake --version >/dev/null 2>&1 ;;
    ninja-build) ninja --version >/dev/null 2>&1 ;;
    libeigen3-dev) has_header Eigen/Core eigen3/Eigen/Core ;;
    libcli11-dev) has_header CLI/CLI.hpp ;;
    libfmt-dev) has_header fmt/format.h ;;
    nlohmann-json3-dev) has_header nlohmann/json.hpp ;;
    libgtest-dev) has_header gtest/gtest.h ;;
    pkg-config) pkg-config --version >/dev/null 2>&1 ;;
    libfabric-dev) has_header rdma/fabric.h ;;
    libibverbs-dev) has_header infiniband/verbs.h ;;
    clang) clang++ --version >/dev/null 2>&1 ;;
    libclang-rt-dev) [[ -e $(clang++ -print-file-name="libclang_rt.fuzzer-$(uname -m).a" 2>/dev/null) ]] ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

debian=false
if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then debian=true; fi

missing=()
for package in "${packages[@]}"; do
  if $debian; then
    is_installed "$package" || missing+=("$package")
  else
    is_usable "$package" || missing+=("$package")
  fi
done
if [[ ${#missing[@]} -eq 0 ]]; then exit 0; fi

# Takes what can be done without out of `missing`; ends well when nothing is left.
need_only_required() {
  local package required=()
  for package in "${missing[@]}"; do
    if is_optional "$package"; then
      local lost="worlds of several processes"
      [[ $package != libibverbs-dev ]] || lost="worlds over RDMA"
      echo "without $package there will be no $lost" >&2
    else
      required+=("$package")
    fi
  done
  missing=("${required[@]}")
  if [[ ${#missing[@]} -eq 0 ]]; then exit 0; fi
}

if ! $debian; then
  need_only_required
  echo "mKernel needs these things (by their Debian names), and this system has no apt to install them:" >&2
  printf '  %s\n' "${missing[@]}" >&2
  exit 2
fi

as_root=()
if [[ $EUID -ne 0 ]]; then
  if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  elif command -v sudo >/dev/null && { : </dev/tty; } 2>/dev/null; then
    as_root=(sudo)
  else
    unusable=()
    for package in "${missing[@]}"; do is_usable "$package" || unusable+=("$package"); done
    if [[ ${#unusable[@]} -eq 0 ]]; then exit 0; fi
    missing=("${unusable[@]}")
    need_only_required
    unusable=("${missing[@]}")
    echo "mKernel needs packages that only root can install, and there is no usable sudo. Run as root:" >&2
    echo "  apt-get update && apt-get install -y --no-install-recommends ${unusable[*]}" >&2
    exit 2
  fi
fi

echo "Installing ${#missing[@]} missing packages:"
printf '  %s\n' "${missing[@]}"
# The timeout waits for another apt, for example the one that runs after boot.
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120)
# A source that cannot be reached need not be one that is needed: the install tells.
"${apt[@]}" update </dev/null || echo "apt-get update failed, trying with the lists that are here" >&2
install() { "${apt[@]}" install -y --no-install-recommends "${missing[@]}" </dev/null; }
if install; then exit 0; fi
before=${#missing[@]}
need_only_required
if [[ ${#missing[@]} -eq $before ]] || ! install; then
  echo "The packages could not be installed (see above). To try by hand, as root:" >&2
  echo "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 2
fi
