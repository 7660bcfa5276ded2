#!/usr/bin/env bash
# Trains the variants of configs/routing_ablation.py from the same cold starts, on-policy and off-policy, and compares them in a
# picture for each regime and a page of tables:
#   bash launch/routing.sh [--seeds="0 1 2"] [--runs=DIR] [--out=DIR] [--dry-run] [--config… flags of gspo_jax.train]
# Without flags: runs in runs/routing, pictures and tables in docs/routing. The ARGS of --config=FILE:ARGS are appended to those
# of each run: --config=configs/routing_ablation.py:runlocal. After an interruption, run it again: it skips finished runs and
# resumes unfinished ones. --dry-run prints the commands. Creates .venv if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/sweep.sh
source launch/sweep.sh

runs=runs/routing
out=docs/routing
config=configs/routing_ablation.py
varied='seed objective.name routing.replay'
read_flags "$@"
file=${config%%:*}
arguments=${config#"$file"}

# flags_of SEED VARIANT[,offpolicy]: sets `flags` to the flags of a run.
flags_of() {
  flags=(--config="$file:$2${arguments/:/,}" ${fields[@]+"${fields[@]}"} --config.seed="$1")
}

# compare REGIME FOLDER…: reports on a regime's runs, and copies the picture to the docs.
compare() {
  local regime=$1 report=$runs/$1/report
  shift
  run "$python" -m gspo_jax.report "$@" --panels=routing --out="$report" --table="$report/results.md"
  run cp "$report/report.png" "$out/$regime.png"
}

# Prints the tables of both regimes as one page.
tables() {
  printf '# Routing, compared\n\n## On-policy, but for the updates of a batch\n\n'
  cat "$runs/on_policy/report/results.md"
  printf '\n## Strongly off-policy\n\n'
  cat "$runs/off_policy/report/results.md"
}

ensure_venv report
ask='import os, runpy, sys; f = sys.argv[1]; print(*(runpy.run_path(f).get("VARIANTS", ()) if os.path.isfile(f) else ()))'
variants=$("$python" -c "$ask" "$file")
if [ -z "$variants" ]; then
  refuse "--config=$file is not a config file with VARIANTS; use configs/routing_ablation.py or one like it"
fi
on_policy=()
off_policy=()
for seed in $seeds; do
  cold=$runs/coldstart-$seed
  flags_of "$seed" "${variants%% *}" # any variant will do: a cold start does not depend on the objective
  make_cold_start "$cold" "${flags[@]}"
  for variant in $variants; do
    on_policy+=("$runs/on_policy/$variant-$seed")
    flags_of "$seed" "$variant"
    train_from "$cold" "$runs/on_policy/$variant-$seed" "${flags[@]}"
    off_policy+=("$runs/off_policy/$variant-$seed")
    flags_of "$seed" "$variant,offpolicy"
    train_from "$cold" "$runs/off_policy/$variant-$seed" "${flags[@]}"
  done
done
run mkdir -p "$out"
compare on_policy "${on_policy[@]}"
compare off_policy "${off_policy[@]}"
if [ -n "$dry" ]; then
  echo "# then writes both tables to $out/results.md"
else
  tables >"$out/results.md"
fi
