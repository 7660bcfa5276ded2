#!/usr/bin/env bash
# Plans every recipe for its slice, and the 30B recipe's update with one field changed at a time, and writes the tables of
# docs/plan.md and docs/plan/cycles.md:
#   bash launch/plans.sh [--runs=DIR] [--page=FILE] [--dry-run]
# Without flags: plans in runs/plans, tables in docs/plan.md and docs/plan/cycles.md; with --page=NAME.md, in NAME.md and
# NAME/cycles.md. Needs no TPU: the compiler runs on this machine, for minutes per recipe, and programs that were compiled before
# are not compiled again. --dry-run prints the commands. Creates .venv if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/command.sh
source launch/command.sh

runs=runs/plans
page=docs/plan.md
for flag in "$@"; do
  case $flag in
    --runs=?*) runs=${flag#*=} ;;
    --page=?*) page=${flag#*=} ;;
    --dry-run) dry=yes ;;
    *) refuse "unexpected $flag; use --runs=, --page= or --dry-run" ;;
  esac
done

# plan NAME CONFIG TOPOLOGY FLAG…: writes the plan $runs/NAME.json.
plan() {
  local name=$1 config=$2 topology=$3
  shift 3
  run .venv/bin/python -m gspo_jax.plan --config="configs/$config" --topology="$topology" "$@" --json="$runs/$name.json"
}

if [ -z "$dry" ]; then ensure_venv tpu; fi
run mkdir -p "$runs"
recipes=()
while read -r name config topology; do
  recipes+=("$runs/$name.json")
  only=("--programs=update,sample_decode")
  if [ "$name" = 30b ]; then only=(); fi # shown in full
  plan "$name" "$config" "$topology" ${only[@]+"${only[@]}"}
done <<'LIST'
30b qwen3_30b_a3b.py v5p:4x4x4
30b-long qwen3_30b_a3b.py:long v5p:4x4x4
30b-v6e qwen3_30b_a3b.py:v6e v6e:8x8
30b-v5e qwen3_30b_a3b.py:v5e v5e:16x16
235b qwen3_235b_a22b.py v5p:4x4x8
235b-least qwen3_235b_a22b.py:least v5p:4x4x4
dense qwen3_dense.py:8B v5p:2x2x1
qwen3.5 mixtures.py:Qwen3.5-35B-A3B v5p:4x4x4
glm-flash mixtures.py:GLM-4.7-Flash v5p:4x4x4
glm-air mixtures.py:GLM-4.5-Air v5p:4x4x8
qwen3.5-host one_host.py:Qwen3.5-35B-A3B v5e:2x4
glm-flash-host one_host.py:GLM-4.7-Flash v5e:2x4
granite granite.py v5e:2x2
olmoe-host one_host.py:OLMoE-1B-7B-0924 v5e:2x4
30b-host-tpu7x one_host.py tpu7x:2x2x1
30b-tpu7x qwen3_30b_a3b.py:16 tpu7x:2x2x2
LIST
choices=()
for field in model.remat=full model.remat=offload training.logprob_chunk=16384 training.logprob_chunk=1048576 mesh.tensor=2; do
  choices+=("$runs/$field.json")
  plan "$field" qwen3_30b_a3b.py v5p:4x4x4 --programs=update --config."$field"
done
run .venv/bin/python docs/draw/plan_tables.py "$page" "${page%.md}/cycles.md" --recipes "${recipes[@]}" --choices "${choices[@]}"
