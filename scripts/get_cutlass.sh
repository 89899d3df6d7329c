#!/usr/bin/env bash
# Puts CUTLASS' headers into .deps/cutlass where nvcc is found and they are not there yet: the CUDA part is built with
# them. From the Python package index, since Debian has none. Exit code 0 also when that fails: then the build leaves
# the CUDA part out, and says so.
set -euo pipefail
cd "$(dirname "$0")/.."
version=4.2.0.0
folder=.deps/cutlass

command -v nvcc >/dev/null || [[ -x ${CUDACXX:-/usr/local/cuda/bin/nvcc} ]] || exit 0
[[ $(cat "$folder/version" 2>/dev/null) == "$version" ]] && exit 0

fail() {
  echo "CUTLASS $version could not be fetched ($1): the CUDA part will be left out" >&2
  exit 0
}
python3 -m pip --version >/dev/null 2>&1 || scripts/bootstrap.sh python3-pip || fail "there is no pip"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "Fetching the headers of CUTLASS $version"
python3 -m pip download -q --no-deps --disable-pip-version-check -d "$work" "nvidia-cutlass==$version" || fail "pip failed"
python3 -m zipfile -e "$work"/nvidia_cutlass-*.whl "$work/wheel" || fail "the package cannot be unpacked"
rm -rf "$folder"
mkdir -p "$folder"
mv "$work/wheel/cutlass_library/source/include" "$folder/include" || fail "the package has no headers"
echo "$version" >"$folder/version"
