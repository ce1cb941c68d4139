#!/usr/bin/env bash
# usage: bench/left_behind.sh: how many files are left in /dev/shm by a job of 4 ranks that is killed with its launcher
# (SIGKILL), over Open MPI, MPICH and lockstep. Removes those that it caused.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/loop.c" <<'C'
#include <mpi.h>
#include <stdlib.h>
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int n = 1 << 20;
  double *in = calloc(n, sizeof *in), *out = calloc(n, sizeof *out);
  while (1) MPI_Allreduce(in, out, n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}
C
cat >"$folder/loop.cpp" <<'C'
#include <lockstep/lockstep.hpp>
#include <vector>
int main() {
  lockstep::init_dist();
  std::vector<double> values(1 << 20);
  while (true) lockstep::all_reduce(values);
}
C

measure() { # NAME COMMAND...
  local before after left
  before=$(ls -A /dev/shm)
  setsid "${@:2}" >/dev/null 2>&1 &
  local launcher=$!
  sleep 4
  # The launcher and all processes below it, also those that have a session of their own.
  mapfile -t job < <(pstree_of $launcher)
  kill -KILL "${job[@]}" 2>/dev/null || true
  wait $launcher 2>/dev/null || true
  sleep 1
  after=$(ls -A /dev/shm)
  left=$(comm -13 <(sort <<<"$before") <(sort <<<"$after") | sed '/^$/d')
  printf '%-10s %d files left in /dev/shm\n' "$1" "$(sed '/^$/d' <<<"$left" | wc -l)"
  while IFS= read -r file; do [ -z "$file" ] || rm -f "/dev/shm/$file"; done <<<"$left"
}
pstree_of() { # PID: it and its descendants
  local child
  echo "$1"
  for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do pstree_of "$child"; done
}

for mpi in openmpi mpich; do
  command -v mpicc.$mpi >/dev/null || continue
  mpicc.$mpi "$folder/loop.c" -o "$folder/$mpi"
  options=()
  [ $mpi != openmpi ] || options=(--allow-run-as-root --oversubscribe)
  measure $mpi mpirun.$mpi "${options[@]}" -n 4 "$folder/$mpi"
done
g++ -std=c++20 -Iinclude "$folder/loop.cpp" -o "$folder/lockstep" build/release/src/liblockstep.a -lfmt -lrt -pthread -ldl
measure lockstep build/release/src/cli/lockstep run -n 4 -- "$folder/lockstep"
