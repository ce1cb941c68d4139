# Runs GoogleTest binaries side by side, a line for each, and counts. Sourced by ./dev.
#
# A binary is split into shards, processes of its own: most tests wait for launchers, deadlines and each
# other, so that more shards than cores are done sooner. BINARY.SHARD.log has all that a shard printed.

passed=0 failed=0 skipped=0 reasons=
failures=  # a line for each
under=()  # what the tests run under
scratch=  # folder of this run

fail() {
  printf '%s\n' "FAILED: $*" && failed=$((failed + 1))
  failures+=$'\n  '$*
}

n_at_once() { echo $((${#under[@]} > 0 ? 1 : $(nproc) + 1)); }

# More shards for what takes longest; never more than run at once.
n_shards() { # BINARY
  case $(basename "$1") in
    core_tests | cli_tests | nn_tests) n_at_once ;;
    *) echo 1 ;;
  esac
}

# Sets `shard_pid`. Not in a subshell: timeout passes a signal on to what it runs. What a shell starts in
# the background ignores SIGINT, which tests of interrupts must not. Two mpiruns of Open MPI that make
# their common session folder at once fail: each shard has one of its own.
start_shard() { # PRESET BINARY FILTER SHARD N_SHARDS
  local run=(env --default-signal=INT,QUIT timeout --kill-after=30 1500)
  # ThreadSanitizer of older compilers cannot map its shadow under much address randomisation.
  if [[ $1 == tsan* ]] && setarch -R true 2>/dev/null; then run=(setarch -R "${run[@]}"); fi
  if [ "$1" = tsan-nn ]; then run=(env TSAN_OPTIONS="suppressions=$PWD/tests/nn/tsan.supp" "${run[@]}"); fi
  if [ "$1" = arm64 ]; then run+=(qemu-aarch64 -L /usr/aarch64-linux-gnu); fi
  local own=$scratch/${2##*/}.$4
  mkdir -p "$own"
  GTEST_TOTAL_SHARDS=$5 GTEST_SHARD_INDEX=$4 OMPI_MCA_orte_tmpdir_base=$own \
    "${run[@]}" "${under[@]}" "$2" --gtest_filter="$3" >"$2.$4.log" 2>&1 </dev/null &
  shard_pid=$!
}

# The output of each test of a log that failed, or was running when its process ended.
failures_of() { # LOG
  awk '/^\[ RUN  / { own = ""; name = $4 }
       { own = own $0 "\n" }
       /^\[  FAILED  \] .* \([0-9]+ ms\)$/ { printf "%s", own }
       / ms\)$/ { name = "" }
       END { if (name != "") printf "%s", own }' "$1" | tail -n 300
}

# One line for a binary whose shards are done; failed tests with their own output.
report_binary() { # BINARY FILTER SECONDS
  local name shard log rc ran ok=0 bad=0 skip=0 all=0 problems='' line
  local logs=("$1".[0-9]*.log)
  name=$(basename "$1")
  n_lines() { grep -cE "$1" "$2" || true; }
  for log in "${logs[@]}"; do
    local o b s
    rc=$(cat "$log.rc")
    ran=$(sed -nE 's/^\[==========\] ([0-9]+) tests? from .* ran\..*/\1/p' "$log" | tail -n 1)
    o=$(n_lines '\[       OK \] .*\([0-9]+ ms\)$' "$log")
    b=$(n_lines '\[  FAILED  \] .*\([0-9]+ ms\)$' "$log")
    s=$(n_lines '\[  SKIPPED \] .*\([0-9]+ ms\)$' "$log")
    ok=$((ok + o)) bad=$((bad + b)) skip=$((skip + s))
    if [ -z "$ran" ]; then
      problems+="$name ended (exit code $rc$([ "$rc" -ne 124 ] || echo ': out of time')) inside $(
        { grep -E '^\[ RUN ' "$log" || tail -n 1 "$log"; } | tail -n 1 | cut -c14-)"$'\n'
    else
      all=$((all + ran))
      if [ "$ran" -ne $((o + b + s)) ]; then
        problems+="$name says it ran $ran tests, but reported on $((o + b + s)): $log"$'\n'
      elif [ "$rc" -ne 0 ] && [ "$b" -eq 0 ]; then
        problems+="$name ended with exit code $rc after its tests: $log"$'\n'
      fi
    fi
    reasons+=$(awk '/^\[ RUN  / { said = "" ; next }
                    /^\[  SKIPPED \].* ms\)$/ { print "\n  " $4 ": " said }
                    !/: Skipped$/ && NF { said = said $0 " " }' "$log")
  done
  if [ "$all" -eq 0 ] && [[ $2 == '*' || $2 == '*-'* ]] && [ -z "$problems" ]; then
    problems+="$name ran no test"$'\n'
  fi
  passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
  printf '  %-12s %5d passed %3d failed %3d skipped %6d s\n' "$name" "$ok" "$bad" "$skip" "$3"
  for log in "${logs[@]}"; do
    [ "$(cat "$log.rc")" -eq 0 ] || failures_of "$log"
    failures+=$(sed -nE "s/^\[  FAILED  \] (.*) \([0-9]+ ms\)$/\n  $name: \1/p" "$log")
  done
  while IFS= read -r line; do [ -z "$line" ] || fail "$line"; done <<<"$problems"
}

# Reads lines "BINARY FILTER" as the binaries are built, runs their shards, and reports on each binary
# when it is done; then writes the counts.
run_binaries() { # PRESET COUNTS_FILE
  local limit preset=$1 line begun= binary shard n now pid rc closed=no
  local -a waiting=() running=() binaries=()
  local -A filter=() left=() start=()
  limit=$(n_at_once)
  scratch=$(mktemp -d)
  trap 'for shard in "${running[@]}"; do kill "${shard%% *}"; done 2>/dev/null; rm -rf "$scratch"' EXIT
  trap 'exit 130' INT TERM
  while [ $closed = no ] || [ ${#waiting[@]} -gt 0 ] || [ ${#running[@]} -gt 0 ]; do
    if [ $closed = no ]; then
      if IFS= read -r -t 0.2 line; then
        line=$begun$line begun=
        binary=${line%% *}
        filter[$binary]=${line#* } n=$(n_shards "$binary")
        left[$binary]=$n binaries+=("$binary")
        rm -f "$binary".[0-9]*.log "$binary".[0-9]*.log.rc
        for ((shard = 0; shard < n; ++shard)); do waiting+=("$binary $shard $n"); done
        continue
      elif [ $? -le 128 ]; then
        closed=yes
      else
        begun+=$line  # its time was up in the middle of a line
      fi
    else
      sleep 0.2
    fi
    while [ ${#waiting[@]} -gt 0 ] && [ ${#running[@]} -lt "$limit" ]; do
      read -r binary shard n <<<"${waiting[0]}"
      waiting=("${waiting[@]:1}")
      : "${start[$binary]:=$SECONDS}"
      start_shard "$preset" "$binary" "${filter[$binary]}" "$shard" "$n"
      running+=("$shard_pid $binary $shard")
    done
    local -a still=()
    for now in "${running[@]}"; do
      read -r pid binary shard <<<"$now"
      if kill -0 "$pid" 2>/dev/null; then
        still+=("$now")
        continue
      fi
      rc=0
      wait "$pid" || rc=$?
      echo $rc >"$binary.$shard.log.rc"
      left[$binary]=$((left[$binary] - 1))
      if [ "${left[$binary]}" -eq 0 ]; then
        report_binary "$binary" "${filter[$binary]}" $((SECONDS - start[$binary]))
      fi
    done
    running=("${still[@]}")
  done
  printf '%d %d %d\n%s' "$passed" "$failed" "$skipped" "$reasons" >"$2"
  printf '%s' "$failures" >"$2.failures"
}
