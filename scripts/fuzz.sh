#!/usr/bin/env bash
# Runs every libFuzzer target of a build for a while. Usage: fuzz.sh BUILD_DIR SECONDS
# Inputs that reach new code are added to tests/corpus/<name>; one that fails stays in BUILD_DIR/failures/.
set -euo pipefail

if [[ $# -ne 2 || ! -f $1/fuzz_targets.txt || ! $2 =~ ^[0-9]+$ ]]; then
  echo "usage: fuzz.sh BUILD_DIR SECONDS, where BUILD_DIR was built with --preset fuzz" >&2
  exit 2
fi
build=$(realpath "$1")
seconds=$2
cd "$(dirname "$0")/.."
mapfile -t targets < <(grep . "$build/fuzz_targets.txt")
if [[ ${#targets[@]} -eq 0 ]]; then
  echo "there is no fuzz target in $build" >&2
  exit 1
fi

failed=()
mkdir -p "$build/failures"
for target in "${targets[@]}"; do
  name=${target%_fuzz}
  kept=tests/corpus/$name
  found=$build/corpus/$name
  mkdir -p "$kept" "$found"
  options=(-rss_limit_mb=2048 -timeout=10 -print_final_stats=1 -verbosity=1 "-artifact_prefix=$build/failures/$target-")
  if [[ -f tests/corpus/$name.dict ]]; then options+=("-dict=tests/corpus/$name.dict"); fi
  echo "== $target for $seconds s"
  if "$build/$target" "${options[@]}" "-max_total_time=$seconds" "$found" "$kept" 2>"$build/$target.log"; then
    "$build/$target" -merge=1 "$kept" "$found" 2>>"$build/$target.log"
    grep -E '^(Done|stat::number_of_executed_units)' "$build/$target.log" || true
    echo "$(find "$kept" -type f | wc -l) inputs kept in $kept"
  else
    failed+=("$target")
    tail -n 60 "$build/$target.log"
  fi
done

if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed: ${failed[*]} (inputs in $build/failures, logs in $build)" >&2
  exit 1
fi
