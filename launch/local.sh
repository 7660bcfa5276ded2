#!/usr/bin/env bash
# Trains on this machine and draws the report: bash launch/local.sh [flags of gspo_jax.train …]
# Without flags: configs/tiny.py into runs/tiny. With another --config: into runs/NAME, or --workdir. Relative paths are taken
# from the repository. Makes .venv first where it is missing. Run it again to go on with a run that was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh

# Sets `workdir` to what the flags say (the last one wins, as in absl), and `defaults` to the flags that they leave out.
read_flags() {
  local config=''
  workdir=''
  defaults=()
  while [ $# -gt 0 ]; do
    case $1 in
      --config=* | -config=*) config=${1#*=} ;;
      --workdir=* | -workdir=*) workdir=${1#*=} ;;
      --config | -config) if [ $# -gt 1 ]; then config=$2 && shift; fi ;;
      --workdir | -workdir) if [ $# -gt 1 ]; then workdir=$2 && shift; fi ;;
      --) break ;;
    esac
    shift
  done
  if [ -z "$config" ]; then
    config=configs/tiny.py
    defaults+=(--config="$config")
  fi
  if [ -z "$workdir" ]; then
    workdir=${config##*/}
    workdir=runs/${workdir%%.py*}
    defaults+=(--workdir="$workdir")
  fi
}

read_flags "$@"
ensure_venv report
.venv/bin/python -m gspo_jax.train ${defaults[@]+"${defaults[@]}"} "$@"
.venv/bin/python -m gspo_jax.report "$workdir"
