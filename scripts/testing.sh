# `./dev test`; sourced by dev. Every run leaves a JUnit file in $results, from which scripts/tests.py makes the
# report: CTest's of the binaries (cmake/LockstepTests.cmake) and of tests/consumer, pytest's, the tutorial's.

# What repeats the same code with more ranks or under launchers that are not lockstep's, and what
# measures: only with --all, as `./dev nightly` does.
nightly_tests='*64_mebibytes*:*/threads_8:*/processes_8:*/hosts_8:*/gloo_8:*ModuleTest.conformance_*:*MpiHostsTest.*'
nightly_tests+=':*ModuleTest.operations_of_the_doctor/openmpi:*ModuleTest.*_computes_wrongly/openmpi'
nightly_tests+=':*/gloo_4:*/gloo_hosts_4:*no_memory_on_one_rank*/hosts_4:*no_memory_on_one_rank*/processes_4:*MessageLevelsTest.*/ranks_64'
nightly_tests+=':*ModuleTest.there_are_more_groups*/openmpi:*ModuleTest.mmengine_cases/openmpi:*ModuleTest.an_exchange_that_ended*/openmpi'
nightly_tests+=':*DataParallelTest.trains_in_f32_*:*TrainingHostsTest.*/2:*TrainingHostsTest.over_open_mpi*:*ShardsHostsTest.*gloo*:RecoveryTest.in_shards_twenty*:TrainTest.sync_bn_on_2_ranks_*:TrainTest.sync_bn_on_4_ranks_*'
nightly_tests+=':RustBindingTest.*:*SlurmTest.*:LaunchersTest.*torchrun*:LaunchersTest.scripts_*:Bench*:LargeObjectsTest.*'

results=
note() { scripts/tests.py note "$results" "$@"; }
n_at_once() { if [ -n "$test_launcher" ]; then echo 1; else echo $(($(nproc) + 1)); fi; }

# A project of its own finds the installed library, builds against it, and runs.
test_consumer() {
  local dir=$PWD/build/release/consumer
  mkdir -p "$dir"
  if ! { cmake --install build/release --prefix "$dir/install" &&
    cmake -G Ninja -S tests/consumer -B "$dir" --fresh -DCMAKE_PREFIX_PATH="$dir/install" &&
    cmake --build "$dir"; } >"$dir/build.log" 2>&1; then
    tail -n 60 "$dir/build.log"
    note failed "tests/consumer does not build"
    return
  fi
  scripts/tests.py run "$results" consumer "$dir" 1
}

# Runs the commands of README.md, the tutorial and examples/README.md over the programs of test_consumer, and
# compares what they print with what is shown.
test_tutorial() {
  local dir=$PWD/build/release/consumer rc=0
  PATH=$dir/install/bin:$PWD/build/venv-python/bin:$PATH timeout --kill-after=30 900 \
    python3 -B scripts/tutorial.py run --junit "$results/tutorial.xml" "$dir" >build/tutorial.log 2>&1 </dev/null || rc=$?
  scripts/tests.py show "$results" tutorial $rc build/tutorial.log
}

# Side by side, because most of a test is waiting. What a shell starts in the background ignores SIGINT, which tests of
# interrupts must not.
run_pytest() { # NAME PYTHON LOG SECONDS ARGUMENT...
  local rc=0
  env --default-signal=INT,QUIT timeout --kill-after=30 "$4" "$2" -m pytest -q -p no:cacheprovider \
    --numprocesses "$(n_at_once)" --tb=short --junitxml="$results/$1.xml" "${@:5}" >"$3" 2>&1 </dev/null || rc=$?
  scripts/tests.py show "$results" "$1" $rc "$3"
}

test_python() { # [MARKS]: which tests, as pytest's -m
  local python=$PWD/build/venv-python/bin/python limit=1800 outcome=skipped
  if ! need_python; then
    [ -z "${CI:-}" ] || outcome=failed
    note $outcome "python: pip cannot install its packages, see build/venv-python.log"
    return
  fi
  if ! install_python; then
    note failed "the Python package does not build"
    return
  fi
  if [ -z "${1-not nightly}" ]; then
    limit=7200
    "$python" -m pip install "${python_frameworks[@]}" >>build/venv-python.log 2>&1 ||
      echo "  without ${python_frameworks[*]}: see build/venv-python.log"
  fi
  run_pytest python "$python" build/python.log $limit -m "${1-not nightly}"
}

# The packages under AddressSanitizer, which is loaded before Python is, and before it the C++ library, whose exceptions it
# intercepts. In an environment of its own that has the rest from build/venv-python. What Python and torch allocate for as
# long as the process lives would be leaks.
test_python_under_asan() { # [MARKS]
  local folder=build/asan-nn python=$PWD/build/asan-nn/venv/bin/python
  configure asan-nn
  venv_over build/venv-python/bin/python $folder/venv
  if ! install_python $folder/venv $folder asan-nn; then
    note failed "the Python package does not build with AddressSanitizer"
    return
  fi
  LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
    run_pytest python "$python" $folder/python.log 3600 -m "${1-not nightly}"
}

# The tests of lockstep-torch, of the libtorch layer in C++, or both, over another PyTorch, in build/torch-VERSION.
test_over() { # torch==VERSION FILTER SUITE...
  local folder=build/${1/==/-} name=${1/==/-}
  need_python_headers
  if ! need_venv "$folder/venv" "$1" "${python_build[@]}" "${python_tests[@]}"; then
    note failed "pip cannot install $1"
    return
  fi
  if [[ " ${*:3} " == *' python '* ]]; then
    if install_python "$folder/venv" "$folder"; then
      run_pytest "$name" "$PWD/$folder/venv/bin/python" "$folder/python.log" 3600 -m 'not nightly' \
        tests/python/test_{nn,torch}*.py tests/python/test_{alone,elastic}.py
    else
      note failed "the Python package does not build over $1"
    fi
  fi
  [[ " ${*:3} " == *' nn '* ]] || return 0
  rm -rf build/torch-venv  # CMake finds PyTorch for it once only
  (need_cuda "$folder/venv" && LOCKSTEP_TORCH_DIR=$(torch_prefix "$folder/venv") ./dev test nn --torch venv --filter "$2" 2>&1) |
    tee "$folder/nn.log" || true
  cp build/torch-venv/results/nn_tests.xml "$results/$name-nn.xml" || note failed "the libtorch layer does not build over $1: $folder/nn.log"
  rm -rf build/torch-venv
}

# Runs the binaries of a line NAME... as soon as these are built: the core's tests run while libtorch's still compile.
run_binaries() { # PRESET FILTER
  local names
  while read -ra names; do
    GTEST_FILTER=$2 scripts/tests.py run "$results" "${names[0]}" "build/$1" "$(n_at_once)" "${names[@]}"
  done
}

command_test() {
  local preset=release filter="*-$nightly_tests" is_whole=yes suites=() name title=''
  local first=() second=() torch_over=() has_python=no run_python=test_python
  while [ $# -gt 0 ]; do
    case $1 in
      --filter) filter=${2:?--filter wants a pattern} is_whole=no && shift 2 ;;
      --all) filter='*' && shift ;;
      --preset) preset=${2:?--preset wants a name} && shift 2 ;;
      --torch)
        case ${2:-} in
          venv) preset=torch-venv ;;
          newer) torch_over=("${venv_torch_newer[@]}") ;;
          [1-9]*) torch_over=("torch==$2") ;;
          *) die "test: --torch takes venv, newer or a version of PyTorch" ;;
        esac
        shift 2
        ;;
      # Forked ranks stay under it, and end with 99 where it has said anything.
      --valgrind) test_launcher='valgrind;-q;--error-exitcode=99;--fair-sched=yes' && shift ;;
      -*) die "test: unknown flag $1 (see ./dev help)" ;;
      python) has_python=yes && shift ;;
      *) suites+=("$1") && shift ;;
    esac
  done
  need python3
  results=$PWD/build/$preset/results
  rm -rf "$results" && mkdir -p "$results"
  if [ ${#torch_over[@]} -gt 0 ]; then
    [ $has_python = no ] || suites+=(python)
    case "$preset ${suites[*]}" in
      'release python' | 'release nn' | 'release nn python') ;;
      *) die "test: --torch with another PyTorch is for python and nn, in their own preset" ;;
    esac
    for name in "${torch_over[@]}"; do test_over "$name" "$filter" "${suites[@]}"; done
    scripts/tests.py close "$results" ''
    return
  fi
  # Only the whole's closing line stands alone.
  [ "$preset" = release ] || title="$preset: "
  [ -z "$test_launcher" ] || title="valgrind: "
  [ "$preset" != asan-nn ] || run_python=test_python_under_asan
  if [ $has_python = yes ] && [ ${#suites[@]} -eq 0 ]; then
    if [ "$filter" = '*' ]; then $run_python ''; else $run_python; fi
    scripts/tests.py close "$results" "$title"
    return
  fi
  [ "$preset" != torch-venv ] || [ ${#suites[@]} -gt 0 ] || suites=(nn train)
  [ "$preset" != arm64 ] || suites=(core)
  if [ -n "$test_launcher" ]; then
    need "${valgrind_packages[@]}"
    [ ${#suites[@]} -gt 0 ] || suites=(core)
    # It has an operator new of its own, which the test of failing allocations cannot replace.
    [ $is_whole = no ] || filter='*/processes_2*:*/processes_3*-*no_memory_on_one_rank*'
  fi
  [ ${#suites[@]} -eq 0 ] || is_whole=no
  need_launchers
  [ "$filter" != '*' ] || need_rust
  need "${build_packages[@]}"
  configure "$preset"

  [ ${#suites[@]} -gt 0 ] || mapfile -t suites < <(
    ninja -C "build/$preset" -t targets all | sed -nE 's/^([a-z]+)_tests: phony$/\1/p' | sort)
  [ ${#suites[@]} -gt 0 ] || die "test: build/$preset has no tests"
  for name in "${suites[@]}"; do
    case $name in core | cli | c) first+=("${name}_tests") ;; *) second+=("${name}_tests") ;; esac
  done
  local built=$results/built feed runner
  mkfifo "$built"
  set -m  # a process group of its own, so that nothing is left where something fails
  run_binaries "$preset" "$filter" <"$built" &
  set +m
  runner=$!
  # shellcheck disable=SC2064
  trap "kill -- -$runner 2>/dev/null || true" EXIT
  exec {feed}>"$built"
  [ ${#first[@]} -eq 0 ] || { build "$preset" "${first[@]}" && echo "${first[@]}" >&"$feed"; }
  [ ${#second[@]} -eq 0 ] || { build "$preset" "${second[@]}" && echo "${second[@]}" >&"$feed"; }
  exec {feed}>&-
  if [ "$preset" = release ] && [ $is_whole = yes ]; then
    build release examples/all
    test_consumer
    has_python=yes
  fi
  if [ $has_python = yes ]; then $run_python; fi
  if [ "$preset" = release ] && [ $is_whole = yes ]; then test_tutorial; fi
  wait "$runner" || note failed "the test runner died"
  trap - EXIT
  scripts/tests.py close "$results" "$title" || return
  [ $is_whole = no ] || [ "$preset" != release ] || scripts/tests.py badge "$results" "$(version)" build/badge.svg
}
