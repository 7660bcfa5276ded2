# shellcheck shell=bash
# Sourced, after venv.sh, by scripts that set -euo pipefail and compare many runs trained from shared cold starts: parses their
# flags, makes cold starts, and starts, resumes or skips runs.
# shellcheck disable=SC2034 # the sourcing scripts read these variables

# shellcheck source=launch/command.sh
source launch/command.sh
# shellcheck source=launch/trainer.sh
source launch/trainer.sh

seeds='0 1 2'
runs='' # folder of the runs and their cold starts
out=''  # folder of the report
config='' # FILE[:arg]
fields=() # --config.NAME=VALUE flags for every run
varied='' # names of the fields that the script varies
python=.venv/bin/python

# read_flags "$@": reads the user's flags over the defaults that the script has set in the variables above.
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

# set_field --config.NAME=VALUE: adds a field, or replaces its default, since a field may be given only once.
set_field() {
  local i name=${1%%=*}
  case " $varied " in
    *" ${name#--config.} "*) refuse "$1 sets a field that this script varies; leave it out, or use --seeds= for seeds" ;;
  esac
  for ((i = 0; i < ${#fields[@]}; i++)); do
    if [ "${fields[i]%%=*}" = "$name" ]; then
      fields[i]=$1
      return
    fi
  done
  fields+=("$1")
}

# make_cold_start FOLDER FLAGS…: trains the initial policy for the runs of a seed, unless it exists.
make_cold_start() {
  local folder=$1
  shift
  if [ -d "$folder" ]; then return; fi
  run "$python" -m gspo_jax.coldstart "$@" --workdir="$folder"
}

# train_from COLD FOLDER FLAGS…: trains a run in FOLDER from that cold start. Resumes an unfinished run, and skips one that was
# finished with exactly these flags. Ends the script if the run is stopped, or fails.
train_from() {
  local cold=$1 folder=$2
  shift 2
  local command=("$python" -m gspo_jax.train "$@" --workdir="$folder")
  if [ "$(cat "$folder/finished" 2>/dev/null)" = "${command[*]}" ]; then return; fi
  if [ ! -d "$folder/coldstart" ]; then
    run mkdir -p "$folder"
    run rm -rf "$folder/coldstart.partial"
    run cp -R "$cold" "$folder/coldstart.partial"
    run mv "$folder/coldstart.partial" "$folder/coldstart" # atomically
  fi
  if [ -n "$dry" ]; then
    run "${command[@]}"
  else
    train "${command[@]}"
    echo "${command[*]}" >"$folder/finished"
  fi
}
