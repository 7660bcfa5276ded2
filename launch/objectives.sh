#!/usr/bin/env bash
# Trains every objective of the catalogue from the same cold starts, and compares them in a table and a picture:
#   bash launch/objectives.sh [--seeds="0 1 2"] [--runs=DIR] [--out=DIR] [--dry-run] [--config… flags of gspo_jax.train]
# Without flags: configs/tiny.py for 50 iterations, runs in runs/objectives, report in docs/objectives. After an interruption, run
# it again: it skips finished runs and resumes unfinished ones. --dry-run prints the commands. Creates .venv if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/sweep.sh
source launch/sweep.sh

runs=runs/objectives
out=docs/objectives
config=configs/tiny.py
fields=(--config.iterations=50)
varied='seed objective.name'
read_flags "$@"
flags=(--config="$config" "${fields[@]}")

ensure_venv report
names=$("$python" -c 'from gspo_jax.objectives import catalogue; print(*catalogue.__all__)')
folders=()
for seed in $seeds; do
  make_cold_start "$runs/coldstart-$seed" "${flags[@]}" --config.seed="$seed"
  for name in $names; do
    folder=$runs/$name-$seed
    folders+=("$folder")
    train_from "$runs/coldstart-$seed" "$folder" "${flags[@]}" --config.objective.name="$name" --config.seed="$seed"
  done
done
run "$python" -m gspo_jax.report "${folders[@]}" --out="$out" --table="$out/results.md"
