#!/usr/bin/env bash
# scripts/packages.sh [--nn]: installs each kind of package into a fresh prefix, and builds and runs programs from
# there: hello in C and C++, with --nn also hello_nn, as ranks of the installed command and under each mpirun; at last
# from nothing, in a bare root (scripts/clean_root.sh).
# build/release is built. What cannot be run here is reported as skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$PWD/build/release out=$PWD/build/packages nn=OFF
[ "${1:-}" != --nn ] || nn=ON
passed=0 failed=0 skipped=0
rm -rf "$out" && mkdir -p "$out"

pass() { passed=$((passed + 1)) && printf '  passed   %s\n' "$1"; }
skip() { skipped=$((skipped + 1)) && printf '  SKIPPED  %s: %s\n' "$1" "$2"; }
check() { # NAME COMMAND...
  local log=$out/${1//[^a-z0-9]/_}.log limit=(timeout 600)
  [ "$(type -t "$2")" != function ] || limit=()
  if "${limit[@]}" "${@:2}" >"$log" 2>&1 </dev/null; then
    pass "$1"
    return 0
  fi
  failed=$((failed + 1))
  printf '  FAILED   %s, see %s\n' "$1" "$log"
  tail -n 20 "$log"
  return 1
}

# The programs of tests/packages over the package in PREFIX, which may not be where it was made for.
programs() { # NAME PREFIX
  local name=$1 prefix=$2 dir=$out/$1-programs run module mpi mpirun libraries
  configure() {
    cmake -G Ninja -S tests/packages -B "$dir" -DCMAKE_PREFIX_PATH="$prefix" -DPACKAGES_NN=$nn &&
      cmake --build "$dir"
  }
  check "$name: programs build" configure || return
  run=("$prefix/bin/lockstep" run -n 3 --)
  check "$name: lockstep --version" "$prefix/bin/lockstep" --version
  check "$name: hello alone" "$dir/hello"
  check "$name: hello as 3 ranks" "${run[@]}" "$dir/hello"
  check "$name: hello_c as 3 ranks" "${run[@]}" "$dir/hello_c"
  [ $nn = OFF ] || check "$name: hello_nn as 3 ranks" "${run[@]}" "$dir/hello_nn"

  libraries=$(dirname "$(find "$prefix" -name lockstep.pc)")
  with_pkg_config() {
    export PKG_CONFIG_PATH=$libraries
    # shellcheck disable=SC2046
    cc -std=c99 "$dir/hello.c" $(pkg-config --cflags --libs lockstep) -o "$dir/hello_pc" &&
      LD_LIBRARY_PATH=$libraries/.. "${run[@]}" "$dir/hello_pc" &&
      c++ -std=c++20 tests/consumer/hello.cpp $(pkg-config --cflags --libs lockstep-cpp) -o "$dir/hello_pc_cpp" &&
      "${run[@]}" "$dir/hello_pc_cpp"
  }
  check "$name: pkg-config, C and C++" with_pkg_config

  # The mpi module, from programs that lie elsewhere: of the static library, and of liblockstep.so.
  while IFS= read -r module; do
    mpi=${module##*-mpi-} mpi=${mpi%.so}
    command -v "mpirun.$mpi" >/dev/null || { skip "$name: $mpi" "no mpirun.$mpi" && continue; }
    mpirun=("mpirun.$mpi" -n 2)
    [ "$mpi" != openmpi ] || mpirun+=(--allow-run-as-root --oversubscribe --bind-to none)
    check "$name: hello over $mpi" "${mpirun[@]}" env -u LOCKSTEP_MPI "$dir/hello" mpi
    check "$name: liblockstep.so over $mpi" "${mpirun[@]}" env -u LOCKSTEP_MPI \
      python3 tests/packages/over_mpi.py "$libraries/../liblockstep.so"
  done < <(find "$prefix" -name 'liblockstep-mpi-*.so')
  on_two_hosts() { # two launchers, as of two hosts
    local both=(run --nnodes 2 --rdzv 127.0.0.1:29457 -n 1)
    "$prefix/bin/lockstep" "${both[@]}" --node-rank 1 -- "$dir/hello" ucx &
    "$prefix/bin/lockstep" "${both[@]}" --node-rank 0 -- "$dir/hello" ucx && wait $!
  }
  module=$(find "$prefix" -name 'liblockstep-ucx.so')
  [ -z "$module" ] || check "$name: hello over ucx" on_two_hosts
}

# --- CMake's install, then the same moved -----------------------------------------------------------
install_parts() {
  local part
  for part in $(sed -nE 's/^set\(CPACK_COMPONENTS_ALL "(.*)"\)$/\1/p' "$build/CPackConfig.cmake" | tr ';' ' '); do
    cmake --install "$build" --prefix "$out/first" --component $part || return
  done
}
check "install" install_parts && mv "$out/first" "$out/moved" &&
  programs moved "$out/moved"

# --- Debian packages -----------------------------------------------------------------------------
if ! command -v dpkg-shlibdeps >/dev/null; then
  skip "deb" "no dpkg-dev"
elif check "deb: made" cpack --config "$build/CPackConfig.cmake" -B "$out/deb"; then
  for package in "$out"/deb/*.deb; do
    printf '  %s, %s, needs %s\n' "$(basename "$package")" "$(du -h "$package" | cut -f1)" \
      "$(dpkg-deb -f "$package" Depends)"
    dpkg-deb -x "$package" "$out/root"
    name=$(dpkg-deb -f "$package" Package)
    check "deb: $name has the licenses" cmp packaging/copyright "$out/root/usr/share/doc/$name/copyright"
  done
  programs deb "$out/root/usr"
fi

# --- Conan: its own build of the sources, over the system's libraries ------------------------------
conan=build/venv-conan/bin/conan
if [ ! -x $conan ]; then
  skip "conan" "no $conan"
else
  export CONAN_HOME=$out/conan
  create() {
    $conan profile detect --force &&
      $conan create packaging/conan --build=missing --no-remote -o 'lockstep/*:system_libraries=True'
  }
  check "conan: made, and its test program run" create
fi

# --- from nothing: a bare root of this system's release ----------------------------------------------
if [ "$EUID" -ne 0 ] || ! command -v debootstrap >/dev/null || ! unshare --mount --pid --fork true 2>/dev/null; then
  skip "bare root" "needs debootstrap and the rights to make namespaces"
elif compgen -G "$out/deb/*.deb" >/dev/null; then
  bare_root() { scripts/clean_root.sh "$out/deb" | tee "$out/bare_root.txt"; }
  ! check "bare root: hello with 2 ranks" bare_root || sed 's/^/  /' "$out/bare_root.txt"
fi

# --- vcpkg: a tool that neither pip nor apt has ------------------------------------------------------
if ! command -v vcpkg >/dev/null; then
  skip "vcpkg" "no vcpkg on this machine"
else
  check "vcpkg" vcpkg install lockstep --overlay-ports=packaging/vcpkg --x-install-root="$out/vcpkg"
fi

printf '\n%d passed, %d failed, %d skipped\n' $passed $failed $skipped
[ $failed -eq 0 ]
