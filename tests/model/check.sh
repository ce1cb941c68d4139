#!/usr/bin/env bash
# Checks the model of the shared engine with spin, then that each way of breaking it is found, that
# model and code name each other's places, and every order of what can happen to the ranks of an
# elastic world. usage: tests/model/check.sh BUILD_FOLDER
set -euo pipefail
model=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/shared_engine.pml
sources=$(cd "$(dirname "$model")/../../src/engines/shared" && pwd)
mkdir -p "$1" && cd "$1"

look() { # MACRO...: leaves spin's report in report.txt
  rm -f pan report.txt
  local reduce=
  [[ " $* " == *' -DSTOPS '* ]] && reduce=-DNOREDUCE  # "provided" excludes partial-order reduction
  spin -a "$@" "$model" >spin.log || { cat spin.log && exit 2; }
  gcc -O2 -w -DSAFETY -DCOLLAPSE -DMEMLIM=3000 $reduce -o pan pan.c
  ./pan -m100000 >report.txt || true
  if grep -E 'max search depth too small|out of memory|reached -DMEMLIM' report.txt; then
    echo "$*: spin did not look at everything" && exit 2
  fi
}

two=(-DN=2 -DN_SMALL_CHUNKS=2 -DN_CHUNKS=3 -DN_SMALL_BEFORE=2 -DN_SMALL_AFTER=2)
three=(-DN=3 -DN_CHUNKS=2 -DN_SMALL_BEFORE=1 -DN_SMALL_AFTER=0)

for name in two three; do
  declare -n sizes=$name
  for waiting in -DOVERSUBSCRIBED -DNOT_OVERSUBSCRIBED; do
    look "${sizes[@]}" $waiting
    grep -q 'errors: 0' report.txt || { cat report.txt && exit 1; }
    printf '%s ranks, %s: no error in %s states\n' $name "${waiting#-D}" \
      "$(awk '/states, stored/ { print $1 }' report.txt)"
  done
done

# Ranks that die at any step, or stop and go on. (With three there are too many states.)
for waiting in -DOVERSUBSCRIBED -DNOT_OVERSUBSCRIBED; do
  for disturbed in "two -DDEATHS" "two -DSTOPS"; do
    read -r name what <<<"$disturbed"
    declare -n sizes=$name
    look "${sizes[@]}" $waiting "$what"
    grep -q 'errors: 0' report.txt || { cat report.txt && exit 1; }
    printf '%s ranks, %s, %s: no error in %s states\n' "$name" "${waiting#-D}" "${what#-D}" \
      "$(awk '/states, stored/ { print $1 }' report.txt)"
  done
done

breaks() { # MACRO WAITING ERROR [MACRO...]: spin must find this error
  look "${two[@]}" "-D$2" "-DBROKEN_$1" "${@:4}"
  grep -q "^pan:1: $3" report.txt || { cat report.txt && echo "BROKEN_$1, $2: no '$3'" && exit 1; }
  printf 'BROKEN_%s, %s: %s\n' "$1" "$2" "$(sed -nE 's/^pan:1: (.*) \(at.*/\1/p' report.txt)"
}

for waiting in OVERSUBSCRIBED NOT_OVERSUBSCRIBED; do
  breaks NO_SECOND_POLL $waiting 'invalid end state'
  breaks NO_WAIT $waiting 'assertion violated'
  breaks TWO_SLOTS $waiting 'assertion violated'
done
breaks WAKE_BEFORE_RAISE NOT_OVERSUBSCRIBED 'invalid end state'  # an oversubscribed rank wakes where it arrives
breaks NO_FENCE NOT_OVERSUBSCRIBED 'invalid end state'
breaks COUNT OVERSUBSCRIBED 'invalid end state' -DDEATHS

# "model: reduce, publish" in the code, /* reduce */ and /* publish */ in the model.
in_model() { grep -oE '^ */\* [a-z_]+ \*/$' "$model" | tr -d ' /*' | sort -u; }
in_code() { grep -rohE 'model: [a-z_, ]+' "$sources" | sed 's/model: //; s/, /\n/g' | sort -u; }
if ! diff <(in_model) <(in_code); then
  echo "$model and the code in $sources do not name the same places" && exit 1
fi

# Who belongs to the next generation is decided by one class without clock and processes, so that the
# code itself is checked: three places, two deaths, and requests, ends, starts and waiting between them.
root=$(cd "$(dirname "$model")/../.." && pwd)
g++ -std=c++20 -O2 -DN_EVENTS=11 -I"$root/src" -I"$root/include" -o generations \
  "$root"/tests/run/elastic_membership_test.cpp "$root/src/run/elastic_membership.cpp" -lgtest_main -lgtest -lfmt -pthread
./generations --gtest_filter='*every_order*' --gtest_output=json:generations.json >report.txt ||
  { cat report.txt && exit 1; }
printf 'generations, 3 places, 2 deaths: no error in %s states\n' \
  "$(sed -nE 's/.*"n_states": "([0-9]+)".*/\1/p' generations.json)"
