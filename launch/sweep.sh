# shellcheck shell=bash
# Sourced, after venv.sh, by scripts that set -euo pipefail, train many runs from shared cold starts and compare them: their
# flags, and how a run begins, goes on after a stop and is left alone once it is finished.
# shellcheck disable=SC2034 # they read these variables

# shellcheck source=launch/command.sh
source launch/command.sh

seeds='0 1 2'
runs='' # where runs and their cold starts go
out=''  # where the report goes
config='' # FILE[:arg]
fields=() # --config.NAME=VALUE for every run
varied='' # names of the fields that the script itself sets
python=.venv/bin/python

# read_flags "$@": what the user asks for, over the defaults that the script has put into the variables above.
read_flags() {
  local flag
  for flag in "$@"; do
    case $flag in
      --seeds=?*) seeds=${flag#*=} ;;
      --runs=?*) runs=${flag#*=} ;;
      --out=?*) out=${flag#*=} ;;
      --dry-run) dry=yes ;;
      --config=?*) config=${flag#*=} ;;
      --config.*=*) set_field "$flag" ;;
      *) refuse "unexpected $flag; use --seeds=, --runs=, --out=, --dry-run, or --config… as for gspo_jax.train" ;;
    esac
  done
}

# set_field --config.NAME=VALUE: takes the place of a default, since a field may be given only once.
set_field() {
  local i name=${1%%=*}
  case " $varied " in
    *" ${name#--config.} "*) refuse "$1 is what this script varies; use --seeds= for seeds, and leave the others out" ;;
  esac
  for ((i = 0; i < ${#fields[@]}; i++)); do
    if [ "${fields[i]%%=*}" = "$name" ]; then
      fields[i]=$1
      return
    fi
  done
  fields+=("$1")
}

# make_cold_start FOLDER FLAGS…: the policy that the runs of a seed begin from.
make_cold_start() {
  local folder=$1
  shift
  if [ -d "$folder" ]; then return; fi
  run "$python" -m gspo_jax.coldstart "$@" --workdir="$folder"
}

# train_from COLD FOLDER FLAGS…: a run in FOLDER from that cold start. A begun one is resumed, one that these very flags have
# finished is left alone.
train_from() {
  local cold=$1 folder=$2
  shift 2
  local command=("$python" -m gspo_jax.train "$@" --workdir="$folder")
  if [ "$(cat "$folder/finished" 2>/dev/null)" = "${command[*]}" ]; then return; fi
  if [ ! -d "$folder/coldstart" ]; then
    run mkdir -p "$folder"
    run rm -rf "$folder/coldstart.partial"
    run cp -R "$cold" "$folder/coldstart.partial"
    run mv "$folder/coldstart.partial" "$folder/coldstart" # whole or not there
  fi
  run "${command[@]}"
  if [ -z "$dry" ]; then echo "${command[*]}" >"$folder/finished"; fi
}
