#!/usr/bin/env bash
# Repeats the studies of docs/evidence/ from nothing, or goes on with them where they were stopped:
#   bash launch/evidence.sh [STEP …] [--jobs=N] [--dry-run]
# Steps of the first study (docs/evidence/protocol.md), all in this order without any: cold (the policies that runs start
# from), drift (an iteration of models that differ in one thing each), noise (what moves their flip rates, and how much of
# the ratio's noise is routing), routers (the same for other routers and layers), screen, second_screen, bounds, tune,
# confirm, tuned, shallow. Of later studies, each on a page of its own: repairs and grid, clipping, length, mismatch_screen,
# mismatch and mismatch_bfloat16; they train the policy that they start from if it is missing. Runs are in runs/, figures and
# tables in docs/evidence/, every iteration of the runs in docs/evidence/data/: runs that are there are not trained again,
# on any machine, and a step without any left only draws. --jobs: runs at a time, 2 by default; noise, routers and length
# measure one at a time. --dry-run prints the commands. Creates .venv if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/command.sh
source launch/command.sh

all=(cold drift noise routers screen second_screen bounds tune confirm tuned shallow)
later=(repairs grid clipping length mismatch_screen mismatch mismatch_bfloat16)
depths=(num_layers=12 learning_rate=0.0001 num_layers=48)
measured=("${depths[@]}" learning_rate=0.0003 learning_rate=0.001 num_experts=128 train_router=True
  "weights_dtype=bfloat16,old_logprobs=sampler" "weights_dtype=int8,old_logprobs=sampler")
routers=(renormalised softmax sigmoid bias groups shared linear_0 linear_1 linear_2 linear_3) # of configs/routers.py
steps=()
jobs=2
data=docs/evidence/data
for word in "$@"; do
  case $word in
    --jobs=?*) jobs=${word#*=} ;;
    --dry-run) dry=yes ;;
    cold | drift | noise | routers | screen | second_screen | bounds | tune | confirm | tuned | shallow) steps+=("$word") ;;
    repairs | grid | clipping | length | mismatch_screen | mismatch | mismatch_bfloat16) steps+=("$word") ;;
    *) refuse "unexpected $word; use steps (${all[*]} ${later[*]}), --jobs=, or --dry-run" ;;
  esac
done
if [ ${#steps[@]} = 0 ]; then steps=("${all[@]}"); fi

cold() { # NAME: train the policy that the runs of a testbed start from
  local config=configs/drift.py
  if [ "$1" = arithmetic ]; then config+=:arithmetic; fi
  if [ ! -d "runs/$1-cold" ]; then
    run .venv/bin/python -m gspo_jax.coldstart --config="$config" --workdir="runs/$1-cold"
  fi
}

length() { # NAME ARGUMENT UPDATES: measure a cold start, trained with the flags if it is missing
  local place=runs/length/$1 out=runs/length-noise/$1${2:+-$2} config=configs/length.py${2:+:$2}
  local kept=$data/length/$1${2:+-$2}.json
  if [ -f "$kept" ]; then return; fi
  if [ ! -d "$place" ]; then
    run .venv/bin/python -m gspo_jax.coldstart --config=configs/length.py "${flags[@]}" --workdir="$place"
  fi
  run .venv/bin/python -m gspo_jax.noise --config="$config" "${flags[@]}" --config.model.folder="$place" \
    --workdir="$place" --updates="$3" --nolayers --out="$out"
  run mkdir -p "$data/length"
  run cp "$out/noise.json" "$kept"
}

listed() { # CONFIG STEP BASELINE: the table alone, as its picture would have too many groups to be read
  local out=runs/$1-sweep/survival/$2
  run .venv/bin/python -m gspo_jax.survival "$data/$2.csv" --baseline="$3" --out="$out"
  run cp "$out/survival.md" "docs/evidence/$2.md"
}

sweep() { # CONFIG STEP: train what is not in the record
  run .venv/bin/python -m gspo_jax.sweep --config="configs/$1.py:$2" --record="$data/$2.csv" --jobs="$jobs"
}

if [ -z "$dry" ]; then ensure_venv report; fi
for step in "${steps[@]}"; do
  case $step in
    cold)
      cold drift
      cold arithmetic
      ;;
    drift)
      run .venv/bin/python -m gspo_jax.sweep --config=configs/drift.py --jobs="$jobs"
      ;;
    noise)
      for name in "${measured[@]}"; do
        if [ -f "$data/noise/$name.json" ]; then continue; fi
        flags=()
        case $name in
          learning_rate=*) flags=("--config.optimizer.$name") ;;
          num_*) flags=("--config.model.architecture.$name") ;;
          train_router=*) flags=("--config.coldstart.$name") ;;
          weights_dtype=*) flags=("--config.sampling.${name%,*}" "--config.training.${name#*,}") ;;
        esac
        run .venv/bin/python -m gspo_jax.noise --config=configs/drift.py --config.objective.name=grpo "${flags[@]}" \
          --workdir="runs/drift-sweep/one/$name-0" --updates=0,1,2,4,16 --out="runs/drift-noise/$name"
        run mkdir -p "$data/noise"
        run cp "runs/drift-noise/$name/noise.json" "$data/noise/$name.json"
      done
      few=("${depths[@]/#/$data/noise/}")
      every=("${measured[@]/#/$data/noise/}")
      run .venv/bin/python -m gspo_jax.studies.noise_figure "${few[@]/%/.json}" --out=docs/evidence/noise
      run .venv/bin/python -m gspo_jax.studies.noise_figure "${every[@]/%/.json}" --out=runs/drift-noise/all
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
    length)
      for seed in 0 1 2; do
        for routers in drawn trained; do
          for layers in 12 24 48; do
            name=$layers-$routers-$seed
            flags=("--config.seed=$seed" "--config.model.architecture.num_layers=$layers")
            if [ "$routers" = trained ]; then flags+=(--config.coldstart.train_router=True); fi
            length "$name" "" 0,1,4,16
            length "$name" rounding 0
          done
        done
      done
      run .venv/bin/python -m gspo_jax.studies.lengths "$data/length"/*.json --out=docs/evidence/length
      ;;
    repairs | clipping | mismatch | mismatch_bfloat16)
      cold arithmetic
      sweep studies "$step"
      primary=()
      case $step in
        clipping) primary=("--primary=gspo vs grpo_at_share; gspo vs drop_responses" --margin=0.08) ;;
        mismatch*)
          primary=("--primary=grpo,center=True,keep_top=20 vs grpo; gspo,old_logprobs=sampler vs gspo" --margin=0.08)
          ;;
      esac
      run .venv/bin/python -m gspo_jax.survival "$data/$step.csv" --baseline=grpo "${primary[@]}" --out="docs/evidence/$step"
      ;;
    grid | mismatch_screen)
      cold arithmetic
      sweep studies "$step"
      base=grpo,learning_rate=3.5e-05-0
      if [ "$step" = mismatch_screen ]; then base=grpo,old_logprobs=recompute,learning_rate=5e-05-2; fi
      listed studies "$step" "$step/$base"
      ;;
    *)
      case $step in
        screen) cold drift ;;
        shallow) ;; # each seed has its own
        *) cold arithmetic ;;
      esac
      sweep evidence "$step"
      case $step in
        bounds) ;; # the sweep's own report has what it is made for
        confirm | tuned | shallow)
          run .venv/bin/python -m gspo_jax.survival "$data/$step.csv" --baseline=grpo --out="docs/evidence/$step"
          ;;
        screen) listed evidence screen screen/grpo,learning_rate=3e-05-0 ;;
        *) listed evidence "$step" "$step/grpo,learning_rate=5e-05-0" ;;
      esac
      ;;
  esac
done
