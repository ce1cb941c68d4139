#!/usr/bin/env bash
# scripts/nightly.sh [--list] [--resume] [STAGE ...]: what ./dev nightly runs. A stage that fails does not
# stop the others. build/nightly/STAGE.log has the output of each, STAGE.result what came of it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=build/nightly
commit=$(git rev-parse HEAD)$(git diff --quiet HEAD || git diff HEAD | sha1sum | cut -c1-8)

# STAGE|MINUTES, about, on two cores|WHAT
stages='tests|11|every test of the release build: also 8 ranks, Slurm, the suite under both mpiruns
torch|8|the libtorch layer and the trainer over PyTorch 2.13, every test
cuda|15|layer and Python package over the CUDA PyTorch of pip: compiled and linked, run where a GPU is
asan|14|core and command whole under AddressSanitizer and UndefinedBehaviorSanitizer
tsan|7|the core whole under ThreadSanitizer
asan-nn|30|libtorch layer and Python packages under AddressSanitizer and UndefinedBehaviorSanitizer, over PyTorch 2.13
tsan-nn|12|what has threads of the libtorch layer under ThreadSanitizer, over PyTorch 2.13
arm64|6|the core for arm64 under qemu: up to 3 ranks as threads and as processes, kernels
campaign|7|500 random faults in real jobs over every engine, 33 in trainings; 100,000 schedules of a simulated cluster
lost_ranks|15|the time from a lost rank to going on in Python, over 500 of them: within what docs/howto/elastic.md promises; hosts under load: none is taken for lost
python|14|the Python package, with 500 random faults, Accelerate, Lightning and others
newer|80|Python package for torch and libtorch layer over the newer versions of PyTorch (venv_torch_newer in scripts/packages.conf)
valgrind|2|ranks that are 2 and 3 processes under memcheck
fuzz|8|each parser for a minute
soak|4|mixed load for 3 minutes: no growth of memory, descriptors, threads
packages|14|Debian packages, a moved prefix, the Conan recipe, a bare root: hello, hello_nn and `lockstep run` from each
docs|1|the site: doxygen without warnings, every link, every public name in the reference
simulation|1|16 simulated hosts, and steps of training on them, beside the alpha-beta model
model|1|the model of the shared engine, and its mutations
lint|9|clang-tidy over every file, every header alone
benchmarks|2|every benchmark compiles
mutations|45|only when named: faults seeded one at a time, each of which `./dev test` must find'

# What qemu, which runs one program, does otherwise than a machine: /proc/PID/stat has no state, RLIMIT_AS is
# ignored, there is no seccomp, MADV_POPULATE_WRITE does nothing, exec starts none of its programs, the counter of time
# is slow; a forked child cannot make a thread if the process that forked had one (as after solo). Then what takes long,
# as 64 ranks do (/5).
under_qemu='-LivenessTest.*:FailuresOfProcesses.*:HierarchicalProcessTest.*:ProcessStateTest.*:*DeathTest.*'
under_qemu+=':TicksTest.*:SyncMasterStress.*:*MessageLevelsTest.*/5:*/solo'
under_qemu+=':*callbacks_without_another_thread*:*/*_4:*/*_8:*/*_16:*/*_64:*ten_thousand*:LargeObjectsTest.*:*messages_past*:DiagnosticsTest.*'
under_qemu+=':*no_memory_for_a_large*:*two_ranks_need_memory*:*disk_that_cannot_be_read*:*first_message_in_slots*'
under_qemu+=':*every_chunk_is_mapped*'

run_stage() {
  case $1 in
    tests) LOCKSTEP_KILLS=1000 ./dev test --all ;;
    torch) ./dev test --torch venv --all ;;
    asan) ./dev test --preset asan --all --filter '-*ModuleTest.conformance_*:*MpiHostsTest.*:*SlurmTest.*' ;;
    cuda) ./dev gpu --compile ;;
    # ThreadSanitizer sees the threads of one process.
    tsan) ./dev test --preset tsan core --filter \
      '-*processes*:*ProcessTest.*:*OfProcesses.*:BootstrapTest.*:CollectResultsMemoryTest.*:ConversionTest.*' ;;
    asan-nn) ./dev test --preset asan-nn nn --all && ./dev test --preset asan-nn python ;;
    tsan-nn) ./dev test --preset tsan-nn nn --filter '-*processes*' ;;
    arm64) ./dev test --preset arm64 core --filter "$under_qemu" ;;
    campaign) LOCKSTEP_FAULT_RUNS=500 LOCKSTEP_FAULT_SEED=$RANDOM \
      ./dev test fault --filter '*CampaignTest.*' &&
      LOCKSTEP_FAULT_RUNS=100000 LOCKSTEP_FAULT_SEED=$RANDOM ./dev test core --filter 'ClusterTest.*' &&
      LOCKSTEP_FAULT_RUNS=200 LOCKSTEP_FAULT_SEED=$RANDOM \
        ./dev test train --filter 'ElasticHostsTest.*' ;;
    lost_ranks) ./dev bench elastic --lost-ranks 500 --limits && ./dev bench elastic --keep &&
      { [ "$EUID" -ne 0 ] || ./dev bench elastic --evictions --limits; } ;;
    python) LOCKSTEP_FAULT_RUNS=500 LOCKSTEP_FAULT_SEED=$RANDOM ./dev test python --all ;;
    newer) ./dev test python nn --torch newer ;;
    valgrind) ./dev test --valgrind ;;
    fuzz) ./dev fuzz ;;
    soak) ./dev soak ;;
    packages) ./dev package --test ;;
    docs) ./dev docs ;;
    mutations) scripts/mutations.sh ;;
    simulation) ./dev bench growth --hosts --check && ./dev bench growth --steps --check ;;
    model) ./dev model ;;
    lint) ./dev lint --all ;;
    benchmarks) ./dev build release bench/all ;;
  esac
}

is_resumed=no names=()
for argument; do
  case $argument in
    --list)
      awk -F'|' '{ printf "%-12s %3d min  %s\n", $1, $2, $3 }' <<<"$stages"
      exit 0
      ;;
    --resume) is_resumed=yes ;;
    *)
      grep -q "^$argument|" <<<"$stages" ||
        { echo "dev: nightly: unknown stage '$argument', expected: $(cut -d'|' -f1 <<<"$stages" | xargs)" >&2 && exit 2; }
      names+=("$argument")
      ;;
  esac
done
[ ${#names[@]} -gt 0 ] || mapfile -t names < <(grep -v 'only when named' <<<"$stages" | cut -d'|' -f1)

mkdir -p $results
for name in "${names[@]}"; do
  if [ $is_resumed = yes ] && grep -q "^$commit passed" "$results/$name.result" 2>/dev/null; then continue; fi
  printf '\n#### %s: about %s\n' "$name" "$(grep "^$name|" <<<"$stages" | awk -F'|' '{ print $2 " minutes: " $3 }')"
  start=$SECONDS outcome=passed
  run_stage "$name" </dev/null 2>&1 | tee "$results/$name.log" || outcome=FAILED
  closing=$(grep -E '^(.*: )?[0-9]+ passed, [0-9]+ failed|^== lint: |^mutations: |^reference: ' "$results/$name.log" | tail -n 1)
  echo "$commit $outcome $((SECONDS - start)) ${closing#== }" >"$results/$name.result"
done

printf '\n%-12s %-8s %6s   %s\n' stage result s 'closing line'
n_bad=0
for name in "${names[@]}"; do
  read -r at outcome seconds closing <"$results/$name.result"
  [ "$outcome" = passed ] || n_bad=$((n_bad + 1))
  printf '%-12s %-8s %6d   %s\n' "$name" "$outcome" "$seconds" "$closing$([ "$at" = "$commit" ] || echo " (of ${at:0:7})")"
done
[ $n_bad -eq 0 ] && echo "nightly: all ${#names[@]} stages passed" || echo "nightly: $n_bad of ${#names[@]} stages FAILED"
[ $n_bad -eq 0 ]
