#!/usr/bin/env bash
# scripts/lint.sh BUILD_DIR [--all]: what ./dev lint runs. BUILD_DIR is configured.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1 all=${2:-} bad=0

stage() { printf '\n== %s\n' "$1"; }
mapfile -t sources < <(git ls-files --cached --others --exclude-standard '*.cpp' '*.hpp' '*.inc')

stage "clang-format"
printf '%s\n' "${sources[@]}" | xargs clang-format-14 --dry-run --Werror || bad=1

stage "who includes whom"
awk -f scripts/check_includes.awk "${sources[@]}" || bad=1

stage "tests that the documents name"
awk -f scripts/check_named_tests.awk $(git ls-files 'tests/*_test.cpp') docs/ddp.md docs/sync_batch_norm.md || bad=1

stage "headers alone"
targets=(headers_alone)
[[ " ${sources[*]} " != *" src/nn/"* ]] || ! grep -q '^LOCKSTEP_NN:BOOL=ON' "$build/CMakeCache.txt" ||
  targets+=(headers_alone_nn)
cmake --build "$build" --target "${targets[@]}" || bad=1

# A room is a folder of src/ or examples/; the core's public headers are read with the rooms that
# define them. A branch is compared with main; main itself with its last 20 commits.
changed_rooms() {
  local base
  base=$(git merge-base HEAD origin/main 2>/dev/null)
  if [ -z "$base" ] || [ "$base" = "$(git rev-parse HEAD)" ]; then
    base=$(git rev-parse -q --verify HEAD~20 || git hash-object -t tree /dev/null)
  fi
  { git diff --name-only "$base" && git ls-files --others --exclude-standard; } |
    sed -nE 's#^include/lockstep/[a-z_]+\.hpp$#src/comm\nsrc/dist\nsrc/sync\nsrc/launch#p
             s#^((src|examples)/[^/]+)/.*\.[ch]pp$#\1#p' | sort -u
}
if [ "$all" = --all ]; then rooms=src$'\n'examples; else rooms=$(changed_rooms); fi

# Not what includes libtorch: slow, and most of what is said speaks of its macros. Nor do clang's own
# errors count: gcc compiles this, and clang 16 takes no default source_location in a class template.
stage "clang-tidy: $(tr '\n' ' ' <<<"$rooms")"
awk -F'"' '/^ *"command"/ { torch = /torch\/csrc|cmake_pch/ } /^ *"file"/ && !torch { print $4 }' \
  "$build/compile_commands.json" | sed "s#^$PWD/##" |
  grep -E "^($(paste -sd'|' <<<"$rooms"))/" | sort -u |
  xargs -r -P "$(nproc)" -n 1 clang-tidy-16 -p "$build" --quiet >"$build/clang-tidy.log" 2>&1
case $? in
  0 | 123) ! grep -aE -A3 'warnings-as-errors\]$' "$build/clang-tidy.log" || bad=1 ;;
  *) tail "$build/clang-tidy.log" && bad=1 ;;
esac

[ "$bad" -eq 0 ] && stage "lint: clean"
exit "$bad"
