#!/usr/bin/env bash
# Trains the shipped digits four ways, from the same seed with the same global batch of 8: on one
# rank, on 4 ranks with SyncBatchNorm, on 4 ranks with each rank's own BatchNorm, and on 4 ranks with
# SyncBatchNorm of which two are killed on the way. Where batches are normalised as a whole, each
# step is computed in 4 shards. Ends with a table and a picture of the four loss curves.
# usage: demo.sh BUILD_DIR OUT_DIR
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
lockstep=${1:?usage: demo.sh BUILD_DIR OUT_DIR}/src/cli/lockstep
train=$1/examples/train/lockstep-train
out=${2:?usage: demo.sh BUILD_DIR OUT_DIR}
epochs=5
options=(--batch 8 --epochs "$epochs" --seed 1 --precision f64 --threads 1)
runs=(one sync plain elastic)
titles=("one rank" "4 ranks, SyncBatchNorm" "4 ranks, BatchNorm"
  "4 ranks, two killed on the way, one replaced")
mkdir -p "$out"

# values EVENT KEY RUN: that number of each such line of the run's metrics.
values() { sed -n "s/^{\"event\":\"$1\",.*\"$2\":\([^,}]*\).*/\1/p" "$out/$3.jsonl"; }

train_one() { "$train" --shards 4 "$@"; }
train_sync() { "$lockstep" run -n 4 -- "$train" --shards 4 "$@"; }
train_plain() { "$lockstep" run -n 4 -- "$train" --sync-bn off "$@"; }
# With fewer than 3 ranks left, the launcher starts a replacement.
train_elastic() {
  local n_steps
  n_steps=$(values epoch step one | tail -n 1)
  "$lockstep" run -n 4 --elastic 2:3 -- "$train" --shards 4 "$@" &
  job=$!
  trap 'kill "$job"' EXIT
  kill_rank 2 $((n_steps / 3))
  kill_rank 1 $((n_steps * 2 / 3))
  wait "$job"
  trap - EXIT
}
kill_rank() { # RANK STEP: when the metrics show that step
  local pid step=0
  until [ "${step:-0}" -ge "$2" ]; do
    kill -0 "$job"
    sleep 0.02
    step=$(values steps step elastic 2>/dev/null | tail -n 1) || true  # no metrics yet
  done
  for pid in $(<"/proc/$job/task/$job/children"); do
    grep -qzx "RANK=$1" "/proc/$pid/environ" || continue
    [ ! -t 1 ] || printf '\r\033[K'  # over the progress bar
    echo "kill -9 $pid  # rank $1, after step $step"
    kill -9 "$pid"
  done
}

for i in "${!runs[@]}"; do
  run=${runs[i]}
  printf '\n%s, global batch of 8\n' "${titles[i]}"
  rm -f "$out/$run.jsonl" "$out/$run.pt"
  "train_$run" "${options[@]}" --save "$out/$run.pt" --metrics "$out/$run.jsonl" --metrics-every 20
done

row() { printf '%-22s %14s %15s %15s %22s\n' "$@"; }
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
digest() { "$train" "${options[@]}" --dump "$out/$1.pt" | sha256sum | cut -c 1-12; }
difference() {
  if [ "$1" = one ]; then echo 0; else "$train" "${options[@]}" --compare "$out/one.pt" "$out/$1.pt" | cut -d' ' -f1; fi
}

echo
row "" "one rank" "4 ranks," "4 ranks," "4 ranks, two killed,"
row "" "" "SyncBatchNorm" "BatchNorm" "one replaced"
for ((epoch = 1; epoch <= epochs; ++epoch)); do
  of_runs "loss, epoch $epoch" %.9f loss_of_epoch "$epoch"
done
of_runs "test accuracy, %" %.2f accuracy
of_runs "images/s" %.0f values summary images_per_second
of_runs "largest difference *" %.1e difference
of_runs "SHA-256" %s digest
cat <<'TEXT'

* the largest absolute difference of any parameter or buffer from those of the one-rank run. Each
  step is computed in 4 shards of 2 images: all four by one rank, one each by 4 ranks, and by the
  ranks that are left where some were killed. So the numbers are the same to the last bit. With
  BatchNorm each rank normalises its own 2 images, so it trains another network.
  SHA-256: of all parameters and buffers, the first 12 digits.
TEXT
[ "$(values generation ranks elastic | tail -n 1)" = 3 ] ||
  echo "  No rank was replaced: the training had ended before the replacement had started."

for run in "${runs[@]}"; do
  paste -d' ' <(values steps step "$run") <(values steps loss "$run") > "$out/$run.dat"
done
# Where the fourth run went on with fewer ranks.
killed_at=$(values generation step elastic | head -n 2 | tr '\n' ' ')
gnuplot -e "directory='$out'; steps_per_epoch=$(values epoch step one | head -n 1)" \
  -e "killed_at='$killed_at'" "$here/loss.gp"
printf '\nThe four loss curves: %s\n' "$out/loss.svg"
