#!/usr/bin/env bash
# Trains in one process on one replica and then on four, from the same seed with the same batches,
# and compares what came out. usage: replicas.sh LOCKSTEP-TRAIN [FLAG OF LOCKSTEP-TRAIN...]
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: replicas.sh LOCKSTEP-TRAIN [FLAG OF LOCKSTEP-TRAIN...]" >&2
  exit 2
fi
train=$1
flags=(--epochs 1 --batch 8 --precision f64 --threads 1 "${@:2}")
largest=1e-9
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

for replicas in 1 4; do
  printf '\nreplicas: %d\n' "$replicas"
  "$train" "${flags[@]}" --data-parallel "$replicas" --save "$out/$replicas.pt"
done

difference=$("$train" "${flags[@]}" --compare "$out/1.pt" "$out/4.pt")
printf '\nlargest difference of a parameter or buffer: %s\n' "$difference"
awk -v difference="${difference%% *}" -v largest="$largest" \
  'BEGIN { exit !(difference + 0 <= largest + 0) }' ||
  { echo "expected at most $largest" && exit 1; }
