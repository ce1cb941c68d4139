#!/usr/bin/env bash
# scripts/mutations.sh [--check] [NAME ...]: whether the gate finds faults. Seeds those of scripts/mutations.txt
# (or only NAMEs), one at a time, in a copy of the last commit under build/mutations, and runs what
# `./dev test` runs of one binary: first the tests that should find the fault, then the others.
# Fails where a fault is not found, or a line of the list no longer fits the sources. The build is lint's,
# not in unity batches: a fault costs one file. --check only looks whether each line fits the sources.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
tree=$PWD/build/mutations list=$PWD/scripts/mutations.txt log=$PWD/build/mutations.log

die() { echo "mutations: $*" >&2 && exit 1; }
# shellcheck disable=SC1090
source <(grep -E '^nightly_tests\+?=' scripts/testing.sh)  # what the gate leaves out
[ -n "${nightly_tests:-}" ] || die "scripts/testing.sh no longer sets nightly_tests"
export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros} GTEST_FAIL_FAST=1

faults() { grep -vE '^(#|$)' "$list"; }
if [ "${1:-}" = --check ]; then
  faults | while IFS='|' read -r name file _ _ change; do
    ! cmp -s <(sed "$change" "$file") "$file" || { echo "mutations: '$name' matches nothing in $file" && exit 1; }
  done
  exit
fi
restore() { git -C "$tree" checkout -q -- .; }
binary_of() { find "$tree/build/lint/tests" -name "$1_tests" -type f -executable; }
build() { # BINARY
  cmake --build "$tree/build/lint" --parallel "$(nproc)" --target "$1_tests" >"$log" 2>&1
}

# Runs a binary's tests of the gate that match; sets `finder` to the first that failed, if any, and
# `n_run` to how many ran. A process that died or hung (exit code 124) has failed the test it was in.
run() { # BINARY FILTER LIMIT_S
  local rc=0
  {  # without what the shell says of a crash
    env --default-signal=INT,QUIT timeout --kill-after=30 "$3" "$(binary_of "$1")" \
      --gtest_filter="$2-$nightly_tests" >"$log" 2>&1 </dev/null || rc=$?
  } 2>/dev/null
  n_run=$(grep -c '^\[ RUN  ' "$log") finder=
  [ $rc -ne 0 ] || return 0
  finder=$(sed -nE 's/^\[  FAILED  \] ([^ ,]+)(, .*)? \([0-9]+ ms\)$/\1/p' "$log" | head -n 1)
  : "${finder:=$(sed -n 's/^\[ RUN      \] //p' "$log" | tail -n 1) (exit code $rc)}"
}

try() { # NAME FILE BINARY EXPECTED SED -> sets `verdict`; returns whether the gate found it
  sed -i "$5" "$tree/$2" || { verdict="ERROR: no such file, or no sed expression" && return 1; }
  if git -C "$tree" diff --quiet; then
    verdict="ERROR: the sed expression matches nothing in $2" && return 1
  fi
  if ! build "$3"; then
    grep -m 3 -E 'error:|^FAILED' "$log"
    verdict="ERROR: does not compile" && return 1
  fi
  run "$3" "$4" 300
  [ "$n_run" -gt 0 ] || { verdict="ERROR: no test of the gate matches $4" && return 1; }
  [ -z "$finder" ] || { verdict="found by $finder" && return 0; }
  run "$3" '*' 1500
  # Not enough to pass: a test of something else may have failed by chance.
  verdict="NOT FOUND by $4; by other tests: ${finder:-none}" && return 1
}

for name; do grep -q "^$name|" "$list" || die "unknown fault '$name', expected: $(faults | cut -d'|' -f1 | xargs)"; done
mkdir -p build
git worktree prune
if [ -e "$tree/.git" ]; then
  git -C "$tree" checkout -q --detach -f "$(git rev-parse HEAD)" || die "cannot update $tree"
else
  git worktree add -q --detach "$tree" HEAD || die "cannot make $tree"
fi
trap restore EXIT
chosen=$(faults | awk -F'|' -v names="$*" 'names == "" || index(" " names " ", " " $1 " ")')
mapfile -t binaries < <(cut -d'|' -f3 <<<"$chosen" | awk '!seen[$0]++')
"$tree/dev" build lint "${binaries[@]/%/_tests}" || die "the tree without a fault does not build"
for binary in "${binaries[@]}"; do
  run "$binary" "$(awk -F'|' -v b="$binary" '$3 == b { printf "%s%s", s, $4; s = ":" }' <<<"$chosen")" 900
  [ -z "$finder" ] || die "$finder fails without any fault, see $log"
done
found=0 bad=0
while IFS='|' read -r name file binary expected change <&3; do
  start=$SECONDS verdict=
  if try "$name" "$file" "$binary" "$expected" "$change"; then found=$((found + 1)); else bad=$((bad + 1)); fi
  restore
  printf '%-22s %4d s  %s\n' "$name" $((SECONDS - start)) "$verdict"
done 3<<<"$chosen"
echo "mutations: $((found + bad)) faults, $found found, $bad not found or in error"
[ $bad -eq 0 ]
