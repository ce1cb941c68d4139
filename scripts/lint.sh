#!/usr/bin/env bash
# scripts/lint.sh BUILD_DIR [--all]: what ./dev lint runs. BUILD_DIR is configured.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1 all=${2:-} now='' bad=''
export LC_ALL=C.UTF-8

stage() { now=$1 && printf '\n== %s\n' "$1"; }
mapfile -t sources < <(git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cpp' '*.hpp' '*.inc')

stage "clang-format"
printf '%s\n' "${sources[@]}" | xargs clang-format-14 --dry-run --Werror || bad+=", $now"

stage "include directions"
awk -f scripts/check_includes.awk "${sources[@]}" || bad+=", $now"

stage "base names"
twice=$(git ls-files 'src/*.[ch]pp' 'src/*.inc' | sed 's#.*/##' | sort | uniq -d)
[ -z "$twice" ] || { echo "more than one file of src/ is called $twice" && bad+=", $now"; }

stage "tests that the documents name"
awk -f scripts/check_named_tests.awk $(git ls-files 'tests/*_test.cpp') docs/ddp.md docs/sync_batch_norm.md docs/howto/training_recipes.md SECURITY.md || bad+=", $now"

stage "files that the documents name"
missing=$(sed -E 's#https://[^ )]*##g' *.md bench/*.md docs/*.md docs/*/*.md |  # not those of other repositories
  grep -oE '\b(src|include|tests|scripts|examples)/[a-z0-9_/]+\.[a-z]+' |
  sort -u | while IFS= read -r file; do [ -e "$file" ] || echo "$file does not exist"; done)
[ -z "$missing" ] || { echo "$missing" && bad+=", $now"; }

stage "lines that the documents name"
missing=$(grep -ohE '`[a-z0-9_/]+\.[ch]pp:[0-9]+` `[^`]+`' docs/*.md docs/*/*.md |
  sed -E 's/`([^:]+):([0-9]+)` `.*\b([a-zA-Z_]+)`/\1 \2 \3/' |
  while read -r file line name; do
    sed -n "${line}p" "$file" | grep -qw "$name" || echo "$file:$line is not $name"; done)
[ -z "$missing" ] || { echo "$missing" && bad+=", $now"; }

stage "environment variables on their page"
missing=$({
  grep -hoE '"(RANK|[A-Z]+_[A-Za-z_]*[A-Za-z])"' src/world/env.cpp src/world/environment.cpp
  grep -rhoE '\bvariable\("[A-Z_]+"' src
} | grep -oE '[A-Z][A-Za-z_]+' | sort -u | while IFS= read -r name; do
  grep -qF "\`$name\`" docs/environment.md || echo "docs/environment.md lacks $name"; done)
[ -z "$missing" ] || { echo "$missing" && bad+=", $now"; }

stage "version in README's picture"
grep -qF ">$(sed -nE 's/^project\(lockstep VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)<" docs/images/badge.svg ||
  { echo "docs/images/badge.svg is of another version: a whole ./dev test writes build/badge.svg" && bad+=", $now"; }

stage "links and anchors"
python3 -B scripts/docs/links.py || bad+=", $now"

stage "lines and words of the documents"
python3 -B scripts/docs/prose.py || bad+=", $now"

stage "messages that failures.md lists"
python3 -B scripts/docs/messages.py || bad+=", $now"

stage "spelling"
git ls-files -z --cached --others --exclude-standard '*.md' '*.hpp' '*.h' '*.cpp' '*.py' '*.pyi' '*.sh' dev scripts/help.txt scripts/packages.conf |
  xargs -0 codespell --ignore-words=scripts/docs/spelling.txt || bad+=", $now"

stage "ruff"
build/venv-lint/bin/ruff check --quiet || bad+=", $now"

stage "mypy"
build/venv-lint/bin/mypy --no-error-summary || bad+=", $now"
build/venv-lint/bin/mypy --no-error-summary --config-file tests/python/mypy.ini || bad+=", $now"

stage "faults that fit the sources"
scripts/mutations.sh --check || bad+=", $now"

stage "recipes that fit CMakeLists.txt"
python3 -B scripts/check_recipes.py || bad+=", $now"

stage "judging of benchmark goals"
python3 -B scripts/performance_test.py || bad+=", $now"
python3 -B bench/compare/schedule_test.py || bad+=", $now"

stage "code in the tutorial"
python3 -B scripts/tutorial.py check || bad+=", $now"

# What the slow stages read: what changed, or everything where their settings did. A branch is compared with main; main
# itself with the commit that .ci/checked names, at which `./dev lint --all` was clean, or else with its last 50 commits.
changed() {
  local base
  base=$(git merge-base HEAD origin/main 2>/dev/null)
  if [ -z "$base" ] || [ "$base" = "$(git rev-parse HEAD)" ]; then
    base=$(git rev-parse -q --verify "$(cat .ci/checked)^{commit}" || git rev-parse -q --verify HEAD~50 || git hash-object -t tree /dev/null)
  fi
  { git diff --no-renames --name-only "$base" && git ls-files --others --exclude-standard; } >"$build/changed.txt"
  if [ "$all" = --all ] || grep -qE '(^|/)CMakeLists\.txt$|\.cmake$|^CMakePresets|^\.clang-tidy$|^scripts/lint\.sh$' "$build/changed.txt"; then
    printf '%s\n' "${sources[@]}"
  else
    cat "$build/changed.txt"
  fi
}

# The headers that changed, and those that include one of them.
mapfile -t headers < <({ changed && grep -oHE '^#include [<"][a-z0-9_/]+\.(hpp|h|inc)' "${sources[@]}"; } | awk -F: '
  function key(path) { sub(/^(src|include)\//, "", path); return path }
  NF == 1 { stale[key($1)] = 1; next }
  { sub(/.*[<"]/, "", $2); from[++n] = key($1); to[n] = $2 }
  END {
    do {
      grown = 0
      for (i = 1; i <= n; ++i) if (to[i] in stale && !(from[i] in stale)) grown = stale[from[i]] = 1
    } while (grown)
    for (path in stale) if (path ~ /\.hpp$/) print path
  }')
ninja -C "$build" -t targets all | sed -n 's#^\(tests/CMakeFiles/headers_alone.*/headers/\([a-z0-9_]*\)_hpp.cpp.o\):.*#\2 \1#p' >"$build/headers.txt"
mapfile -t targets < <(printf '%s\n' "${headers[@]}" | tr './' '__' | sed 's/_hpp$//' | sort | join - <(sort "$build/headers.txt") | cut -d' ' -f2)
stage "headers alone: ${#targets[@]} of $(wc -l <"$build/headers.txt")"
[ -s "$build/headers.txt" ] || bad+=", $now"
[ ${#targets[@]} -eq 0 ] || cmake --build "$build" --target "${targets[@]}" >"$build/headers.log" 2>&1 ||
  {
    grep -A 20 '^FAILED' "$build/headers.log" || tail -n 20 "$build/headers.log"
    bad+=", $now"
  }

# Each changed file, and the .cpp of each changed header. Not what includes libtorch: slow, and most of
# what is said speaks of its macros. Of clang's own errors only names count that a file lacks by itself, as it
# may in a unity batch: gcc compiles this, and clang 16 takes no default source_location in a class template.
stems=$(changed | sed -nE 's#^(src|include|examples)/.*/([a-z0-9_]+)\.[ch]pp$#\2#p' | sort -u | paste -sd'|')
mapfile -t tidied < <(awk -F'"' '/^ *"command"/ { torch = /torch\/csrc|cmake_pch/ } /^ *"file"/ && !torch { print $4 }' \
  "$build/compile_commands.json" | sed "s#^$PWD/##" | grep -E "^(src|examples)/.*/($stems)\.cpp$" | sort -u)
stage "clang-tidy: ${#tidied[@]} files"
printf '%s\n' "${tidied[@]}" |
  xargs -r -P "$(nproc)" -n 1 clang-tidy-16 -p "$build" --quiet >"$build/clang-tidy.log" 2>&1
case $? in
  0 | 123) ! grep -aE -A3 'warnings-as-errors\]$|undeclared identifier|unknown type name' "$build/clang-tidy.log" || bad+=", $now" ;;
  *) tail "$build/clang-tidy.log" && bad+=", $now" ;;
esac

stage "lint: ${bad:+not }clean${bad/#,/:}"
[ -z "$bad" ]
