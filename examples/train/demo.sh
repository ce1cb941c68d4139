#!/usr/bin/env bash
# Trains the shipped digits three ways, from the same seed with the same global batch of 8: on one
# rank, on 4 ranks with SyncBatchNorm, on 4 ranks with each rank's own BatchNorm. Ends with a table
# and a picture of the three loss curves.
# usage: demo.sh BUILD_DIR OUT_DIR
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
lockstep=${1:?usage: demo.sh BUILD_DIR OUT_DIR}/src/cli/lockstep
train=$1/examples/train/lockstep-train
out=${2:?usage: demo.sh BUILD_DIR OUT_DIR}
epochs=5
options=(--batch 8 --epochs "$epochs" --seed 1 --precision f64 --threads 1)
runs=(one sync plain)
titles=("one rank" "4 ranks, SyncBatchNorm" "4 ranks, BatchNorm")
mkdir -p "$out"

train_one() { "$train" "$@"; }
train_sync() { "$lockstep" run -n 4 -- "$train" --sync-bn on "$@"; }
train_plain() { "$lockstep" run -n 4 -- "$train" --sync-bn off "$@"; }

for i in "${!runs[@]}"; do
  run=${runs[i]}
  printf '\n%s, global batch of 8\n' "${titles[i]}"
  rm -f "$out/$run.jsonl" "$out/$run.pt"
  "train_$run" "${options[@]}" --save "$out/$run.pt" --metrics "$out/$run.jsonl" --metrics-every 20
done

# values EVENT KEY RUN: that number of each such line of the run's metrics.
values() { sed -n "s/^{\"event\":\"$1\",.*\"$2\":\([^,}]*\).*/\1/p" "$out/$3.jsonl"; }
row() { printf '%-28s %14s %24s %20s\n' "$@"; }
of_runs() { # LABEL FORMAT COMMAND...: a row with what the command says of each run
  local label=$1 format=$2 cells=() run
  shift 2
  for run in "${runs[@]}"; do
    # shellcheck disable=SC2059
    cells+=("$(printf "$format" "$("$@" "$run")")")
  done
  row "$label" "${cells[@]}"
}
loss_of_epoch() { values epoch loss "$2" | sed -n "$1p"; }
accuracy() { values summary test_accuracy "$1" | awk '{ print 100 * $1 }'; }
difference() {
  if [ "$1" = one ]; then echo 0; else "$train" "${options[@]}" --compare "$out/one.pt" "$out/$1.pt" | cut -d' ' -f1; fi
}

echo
row "" "${titles[@]}"
for ((epoch = 1; epoch <= epochs; ++epoch)); do
  of_runs "loss, epoch $epoch" %.9f loss_of_epoch "$epoch"
done
of_runs "test accuracy, %" %.2f accuracy
of_runs "images/s" %.0f values summary images_per_second
of_runs "largest difference *" %.1e difference
cat <<'TEXT'

* the largest absolute difference of any parameter or buffer from those of the one-rank run.
  The runs use float64: with SyncBatchNorm only the order of the additions differs. With BatchNorm
  each rank normalises its own 2 images, so it trains another network.
TEXT

for run in "${runs[@]}"; do
  paste -d' ' <(values steps step "$run") <(values steps loss "$run") > "$out/$run.dat"
done
gnuplot -e "directory='$out'; steps_per_epoch=$(values epoch step one | head -n 1)" "$here/loss.gp"
printf '\nThe three loss curves: %s\n' "$out/loss.svg"
