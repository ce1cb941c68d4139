# `./dev bench`; sourced by dev.

bench_result=build/release/performance.json

bench_growth() {
  local bin=build/release/bench/growth
  if [[ "$*" =~ ^--(hosts|steps)( --check)?$ ]]; then
    local what=${BASH_REMATCH[1]} script=scripts/growth.py
    [ "$what" = hosts ] || script=scripts/growth_steps.py
    local log=$bin/$what.log
    local simulated=("$bin/growth_$what" $bin/libgrowth_simulated_mpi.so "$log")
    need "${simulation_packages[@]}"
    build release "growth_$what"
    rm -f "$log"
    if [ $# -eq 2 ]; then
      $script check "${simulated[@]}"
      return
    fi
    $script simulate "${simulated[@]}"
    $script draw "$log" docs/scaling.md
  elif [ "$*" = --messages ]; then
    build release growth_messages
    scripts/growth.py messages $bin/growth_messages docs/scaling.md
  elif [ $# -eq 0 ]; then
    need "${valgrind_packages[@]}"
    build release growth_one_host
    scripts/growth.py one_host $bin/growth_one_host docs/scaling.md
  else
    die "bench growth: unknown argument ${1} (see ./dev help)"
  fi
}

build_bench_of_torch() { # PROGRAM...: over PyTorch's libtorch, where `./dev setup peers` has brought it
  [ ! -e "build/venv/${venv_torch/==/-}" ] || build torch-venv-bench "$@"
}

bench_python() { # FILE of bench/ ARGUMENT...
  [ "$1" != elastic.py ] || need libucx-dev iproute2  # of --hosts
  need_python || die "bench: see build/venv-python.log"
  install_python || die "bench: the Python package does not build"
  case $1 in
    elastic.py) build release lockstep_cli lockstep-train bench_elastic_state ;;
    training_steps.py)
      case " $* " in
        *' --settings '*) need libjemalloc2 libtcmalloc-minimal4 ;;
        *) build_bench_of_torch bench_training_step ;;
      esac
      ;;
  esac
  build/venv-python/bin/python "bench/$1" "${@:2}"
}

bench_mpi() {
  need "${launcher_packages[@]}"
  build release lockstep_over_mpi >&2
  [ "${1:-}" != --hosts ] || set -- --hosts docs/scaling.md "${@:2}"
  scripts/over_mpi.py build/release/bench "$@"
}

bench_ucx() { # [--engines] [BLOCKS]
  need "${launcher_packages[@]}" ucx-utils
  build release over-ucx lockstep_cli lockstep_modules >&2
  if [ "${1:-}" = --engines ]; then
    need_python && install_python || die "bench: the Python package does not build: see build/python.log"
    set -- --engines build/venv-python/bin/python "${@:2}"
  fi
  python3 bench/over_ucx.py build/release "$@"
}

# All runs, or those of --only, into the record; then the pages, or with --check which goals they reach.
bench_all() { # [--check] [--only RUN,...]
  local is_check='' only=()
  if [ "${1:-}" = --check ]; then is_check=yes && shift; fi
  if [ "${1:-}" = --only ]; then
    IFS=, read -ra only <<<"${2:?--only takes names of runs}"
    is_check=yes && shift 2
  fi
  [ $# -eq 0 ] || die "bench: unknown argument $1 (see ./dev help)"
  need "${demo_packages[@]}" "${launcher_packages[@]}"
  build release lockstep_cli lockstep-train bench/all
  build_bench_of_torch bench_sync_batch_norm bench_training_step
  # The Python package beside Gloo, where its environment exists.
  [ ! -e build/venv-python ] || install_python || die "bench: the Python package does not build"
  scripts/performance.py measure build/release/src/cli/lockstep "$bench_result" "${only[@]}"
  if [ -n "$is_check" ]; then
    scripts/performance.py check "$bench_result" bench/goals.json "${only[@]}"
  else
    scripts/performance.py draw "$bench_result" docs/performance.md bench/README.md
  fi
}

command_bench() {
  local name
  case "${1:-} $#" in
    growth\ *) bench_growth "${@:2}" ;;
    python\ *) bench_python python_ranks.py "${@:2}" ;;
    steps\ *) bench_python training_steps.py "${@:2}" ;;
    elastic\ *) bench_python elastic.py "${@:2}" ;;
    mpi\ *) bench_mpi "${@:2}" ;;
    ucx\ *) bench_ucx "${@:2}" ;;
    '--diff 3') scripts/performance.py diff "$2" "$3" ;;
    '--check 2') scripts/performance.py check "$2" bench/goals.json ;;
    --diff\ *) die "bench: --diff takes two records, as those of bench/results" ;;
    ' 0' | --*) bench_all "$@" ;;
    *)
      name=${1#bench_}
      [ -e "bench/$name.cpp" ] || [ -e "bench/nn/$name.cpp" ] ||
        die "bench: there is no benchmark $name; there are $(cd bench && basename -as .cpp -- *.cpp nn/*.cpp | xargs)" \
          "and growth, python, steps, elastic, mpi, ucx"
      build release lockstep_cli "bench_$name"
      "build/release/bench/bench_$name" "${@:2}"
      ;;
  esac
}
