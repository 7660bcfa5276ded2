#!/usr/bin/env bash
# Repeats the study of docs/evidence/protocol.md from nothing, or goes on with it where it was stopped:
#   bash launch/evidence.sh [STEP …] [--jobs=N] [--dry-run]
# Steps, all in this order without any: cold (the policies that runs start from), drift (an iteration of models that differ in one
# thing each), noise (what moves their flip rates, and how much of the ratio's noise is routing), routers (the same for
# other routers and layers), screen, second_screen, bounds, tune, confirm, tuned, shallow. Runs are in runs/, figures and tables in
# docs/evidence/. With runs that are finished a step only draws. --jobs: runs at a time, 2 by default; noise and routers measure
# one at a time. --dry-run prints the commands. Creates .venv if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/command.sh
source launch/command.sh

all=(cold drift noise routers screen second_screen bounds tune confirm tuned shallow)
depths=(num_layers=12 learning_rate=0.0001 num_layers=48)
measured=("${depths[@]}" learning_rate=0.0003 learning_rate=0.001 num_experts=128 train_router=True
  "weights_dtype=bfloat16,old_logprobs=sampler" "weights_dtype=int8,old_logprobs=sampler")
routers=(renormalised softmax sigmoid bias groups shared linear_0 linear_1 linear_2 linear_3) # of configs/routers.py
steps=()
jobs=2
for word in "$@"; do
  case $word in
    --jobs=?*) jobs=${word#*=} ;;
    --dry-run) dry=yes ;;
    cold | drift | noise | routers | screen | second_screen | bounds | tune | confirm | tuned | shallow) steps+=("$word") ;;
    *) refuse "unexpected $word; use steps (${all[*]}), --jobs=, or --dry-run" ;;
  esac
done
if [ ${#steps[@]} = 0 ]; then steps=("${all[@]}"); fi

if [ -z "$dry" ]; then ensure_venv report; fi
for step in "${steps[@]}"; do
  case $step in
    cold)
      for name in drift arithmetic; do
        if [ -d "runs/$name-cold" ]; then continue; fi
        config=configs/drift.py
        if [ "$name" = arithmetic ]; then config+=:arithmetic; fi
        run .venv/bin/python -m gspo_jax.coldstart --config="$config" --workdir="runs/$name-cold"
      done
      ;;
    drift)
      run .venv/bin/python -m gspo_jax.sweep --config=configs/drift.py --jobs="$jobs"
      ;;
    noise)
      for name in "${measured[@]}"; do
        if [ -f "runs/drift-noise/$name/noise.json" ]; then continue; fi
        flags=()
        case $name in
          learning_rate=*) flags=("--config.optimizer.$name") ;;
          num_*) flags=("--config.model.architecture.$name") ;;
          train_router=*) flags=("--config.coldstart.$name") ;;
          weights_dtype=*) flags=("--config.sampling.${name%,*}" "--config.training.${name#*,}") ;;
        esac
        run .venv/bin/python -m gspo_jax.noise --config=configs/drift.py --config.objective.name=grpo "${flags[@]}" \
          --workdir="runs/drift-sweep/one/$name-0" --updates=0,1,2,4,16 --out="runs/drift-noise/$name"
      done
      run .venv/bin/python -m gspo_jax.studies.noise_figure "${depths[@]/#/runs/drift-noise/}" --out=docs/evidence/noise
      run .venv/bin/python -m gspo_jax.studies.noise_figure "${measured[@]/#/runs/drift-noise/}" --out=runs/drift-noise/all
      run cp runs/drift-noise/all/noise.md docs/evidence/drift.md
      ;;
    routers)
      out=runs/routers-noise
      for arm in "${routers[@]}"; do
        config=configs/routers.py:$arm
        case $arm in bias | groups | shared) bias=0.1 ;; *) bias=0 ;; esac
        run .venv/bin/python -m gspo_jax.studies.random_models --config="$config" --seeds=5 --bias=$bias --out="runs/routers/$arm"
        for seed in 0 1 2 3 4; do
          model=runs/routers/$arm-$seed
          noise=(.venv/bin/python -m gspo_jax.noise --config="$config" --config.seed="$seed" --config.model.folder="$model"
            --workdir="$model" --updates=1 --nolayers)
          if [ ! -f "$out/$arm-$seed/noise.json" ]; then run "${noise[@]}" --out="$out/$arm-$seed"; fi
          if [ "$arm" = bias ] && [ ! -f "$out/moving-$seed/noise.json" ]; then
            run "${noise[@]}" --config.routing.bias_rate=0.001 --out="$out/moving-$seed" # the update moves the biases, too
          fi
        done
      done
      run .venv/bin/python docs/draw/routers.py "$out"
      ;;
    *)
      run .venv/bin/python -m gspo_jax.sweep --config="configs/evidence.py:$step" --jobs="$jobs"
      runs=runs/evidence-sweep/$step
      case $step in
        bounds) ;; # the sweep's own report has what it is made for
        confirm | tuned | shallow)
          run .venv/bin/python -m gspo_jax.survival "$runs"/*-[0-9]* --baseline="$runs/grpo-10" --out="docs/evidence/$step"
          ;;
        *)
          baselines=("$runs/grpo,"learning_rate=*-[0-9]*) # of any rate: groups are paired by seed
          out=runs/evidence-sweep/survival/$step # its picture has too many groups to be read
          run .venv/bin/python -m gspo_jax.survival "$runs"/*-[0-9]* --baseline="${baselines[0]}" --out="$out"
          run cp "$out/survival.md" "docs/evidence/$step.md"
          ;;
      esac
      ;;
  esac
done
