#!/usr/bin/env bash
# Trains every objective of the catalogue from the same cold starts and compares them in a table and a picture:
#   bash launch/objectives.sh [--seeds="0 1 2"] [--runs=DIR] [--out=DIR] [--dry-run] [--config… flags of gspo_jax.train]
# Without flags: configs/tiny.py for 50 iterations, runs in runs/objectives, report in docs/objectives. Run it again to go on
# after a stop: finished runs are left alone, begun ones resumed. --dry-run prints the commands. Makes .venv where it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh

seeds='0 1 2'
runs=runs/objectives
out=docs/objectives
dry=''
config=--config=configs/tiny.py
iterations=--config.iterations=50
more=()
for flag in "$@"; do
  case $flag in
    --seeds=?*) seeds=${flag#*=} ;;
    --runs=?*) runs=${flag#*=} ;;
    --out=?*) out=${flag#*=} ;;
    --dry-run) dry=yes ;;
    --config=*) config=$flag ;;
    --config.iterations=*) iterations=$flag ;; # a field may be given only once
    --config.seed=* | --config.objective.name=*)
      echo "error: $flag is what this script varies; use --seeds=, and leave the objective out" >&2
      exit 2
      ;;
    --config.*=*) more+=("$flag") ;;
    *)
      echo "error: unexpected $flag; use --seeds=, --runs=, --out=, --dry-run, or --config… as for gspo_jax.train" >&2
      exit 2
      ;;
  esac
done
flags=("$config" "$iterations" ${more[@]+"${more[@]}"})

# Runs a command, or with --dry-run prints it.
run() {
  if [ -n "$dry" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

# Gives a run folder that has not begun the cold start $2, so that all objectives of a seed begin from one policy.
begin() {
  if [ -d "$1/coldstart" ]; then return; fi
  run mkdir -p "$1"
  run rm -rf "$1/coldstart.partial"
  run cp -R "$2" "$1/coldstart.partial"
  run mv "$1/coldstart.partial" "$1/coldstart" # whole or not there
}

ensure_venv report
python=.venv/bin/python
names=$("$python" -c 'from gspo_jax.objectives import catalogue; print(*catalogue.__all__)')
folders=()
for seed in $seeds; do
  cold=$runs/coldstart-$seed
  if [ ! -d "$cold" ]; then
    run "$python" -m gspo_jax.coldstart "${flags[@]}" --config.seed="$seed" --workdir="$cold"
  fi
  for name in $names; do
    folder=$runs/$name-$seed
    folders+=("$folder")
    command=("$python" -m gspo_jax.train "${flags[@]}" --config.objective.name="$name" --config.seed="$seed" --workdir="$folder")
    if [ "$(cat "$folder/finished" 2>/dev/null)" = "${command[*]}" ]; then continue; fi
    begin "$folder" "$cold"
    run "${command[@]}"
    if [ -z "$dry" ]; then echo "${command[*]}" >"$folder/finished"; fi
  done
done
run "$python" -m gspo_jax.report "${folders[@]}" --out="$out" --table="$out/results.md"
