#!/usr/bin/env bash
# Plans an update of Qwen3-30B-A3B on 16, 64, 256 and 1024 v5p chips, with equal work per chip, and draws how it scales:
#   bash launch/scaling.sh [--runs=DIR] [--out=DIR] [--dry-run] [--config.NAME=VALUE for all]
# Without flags: plans in runs/scaling, picture and table in docs/scaling. Needs no TPU: the compiler runs on this machine, for a
# few minutes per slice, and programs that were compiled before are not compiled again. --dry-run prints the commands. Creates
# .venv if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/command.sh
source launch/command.sh

runs=runs/scaling
out=docs/scaling
fields=()
for flag in "$@"; do
  case $flag in
    --runs=?*) runs=${flag#*=} ;;
    --out=?*) out=${flag#*=} ;;
    --dry-run) dry=yes ;;
    --config.*=*) fields+=("$flag") ;;
    *) refuse "unexpected $flag; use --runs=, --out=, --dry-run, or --config.NAME=VALUE as for gspo_jax.plan" ;;
  esac
done

if [ -z "$dry" ]; then
  ensure_venv tpu
  ensure_venv report # for the figure
fi
plans=()
run mkdir -p "$runs"
for slice in 16:2x2x4 64:4x4x4 256:4x8x8 1024:8x8x16; do
  chips=${slice%:*}
  plans+=("$runs/$chips.json")
  run .venv/bin/python -m gspo_jax.plan --config="configs/qwen3_30b_a3b.py:$chips" --topology="v5p:${slice#*:}" --programs=update \
    --json="$runs/$chips.json" ${fields[@]+"${fields[@]}"}
done
run .venv/bin/python docs/draw/scaling.py "${plans[@]}" --out="$out"
