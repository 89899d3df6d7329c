#!/usr/bin/env bash
# Verifies the Promela models beside it, and that every broken variant is found out. Needs spin and a C compiler.
# Exit: 0 all as expected, 1 not, 77 spin is missing.
set -euo pipefail
cd "$(dirname "$0")"

if ! command -v spin >/dev/null; then
  echo "SKIPPED: the protocol models were not verified, because spin is missing (Debian: apt-get install spin)" >&2
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# check MODEL VARIANT EXPECTED: VARIANT is a macro or "-"; EXPECTED is "holds" or "fails" (by an assertion).
check() {
  local model=$1 variant=$2 expected=$3 found
  local define=() options=(-m1000000)
  if [[ $expected == fails ]]; then options+=(-E); fi  # a variant must break a claim, not merely get stuck
  if [[ $variant != - ]]; then define=("-D$variant"); fi
  if ! (
    cp "$model.pml" "$work/" && cd "$work" && rm -f pan* -- *.trail &&
      spin -a "${define[@]}" "$model.pml" && "${CC:-cc}" -O2 -DSAFETY -DVECTORSZ=2048 -w -o pan pan.c &&
      ./pan "${options[@]}" >pan.log
  ) >"$work/log" 2>&1; then
    echo "FAILED   $model $variant: could not be verified"
    cat "$work/log"
    failures=$((failures + 1))
    return
  fi
  if grep -q "errors: 0" "$work/pan.log"; then
    found=holds
    if grep -qE "max search depth too small|Search not completed" "$work/pan.log"; then found="cut short"; fi
  elif grep -q "assertion violated" "$work/pan.log"; then
    found=fails
  else
    found="gets stuck"
  fi
  local states
  states=$(grep -Eo '[0-9.e+]+ states, stored' "$work/pan.log" || true)
  if [[ $found == "$expected" ]]; then
    echo "ok       $model $variant $found ($states)"
  else
    echo "FAILED   $model $variant: $found, expected: $expected ($states)"
    cat "$work/pan.log"
    failures=$((failures + 1))
  fi
}

check ring - holds
check ring NO_BACK_PRESSURE fails
check ring NO_LAP fails
check ring EARLY_POP fails
check ring NO_CAS fails
check epochs - holds
check epochs NO_COMPLETION_WAIT fails
check epochs ONE_BUFFER fails
check epochs STAMP_FIRST fails
check arrivals - holds
check arrivals ONE_COUNTER fails
check arrivals EAGER fails
check arrivals NO_RESET fails

if [[ $failures -gt 0 ]]; then
  echo "$failures models are not as expected" >&2
  exit 1
fi
