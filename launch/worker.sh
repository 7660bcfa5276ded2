#!/usr/bin/env bash
# Runs on a TPU VM on behalf of tpu.sh, in the home folder: bash gspo_jax/launch/worker.sh COMMAND …
#   setup [gs://BUCKET/FOLDER …]    installs the project, and copies each FOLDER to fetched/
#   start ARGUMENT …                starts python ARGUMENT … in gspo_jax/ in the background; output goes to run/log
#   status                          prints one line: none, running, finished, stopped, or failed with the exit code
#   stop                            stops the run, by force after 60 seconds
# The run has a session of its own and survives a lost connection.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
home=$(dirname "$PWD")
mkdir -p "$home/run"

setup() {
  local source
  # shellcheck source=launch/venv.sh
  source launch/venv.sh
  PATH=$HOME/.local/bin:$PATH
  if [ ! -x .venv/bin/python ] && ! pick_python >/dev/null 2>&1; then # the image's Python may be too old
    python3 -m pip install --user --quiet uv
    uv python install 3.12
  fi
  ensure_venv tpu
  if ! command -v bwrap >/dev/null; then # sandbox for rewards that run code
    sudo apt-get install -y -q bubblewrap || echo "note: bubblewrap could not be installed" >&2
  fi
  for source in "$@"; do
    mkdir -p "$home/fetched/${source##*/}"
    gcloud storage rsync --recursive "$source" "$home/fetched/${source##*/}"
  done
}

# Succeeds if the run's process is alive.
alive() {
  [ -s "$home/run/pid" ] && kill -0 "$(cat "$home/run/pid")" 2>/dev/null
}

start() {
  if alive; then
    echo "error: process $(cat "$home/run/pid") is already running; stop it first" >&2
    exit 2
  fi
  rm -f "$home/run/pid" "$home/run/exit" "$home/run/stopped"
  # The wrapper ignores SIGTERM and waits for the run, which saves a checkpoint before it exits.
  # shellcheck disable=SC2016 # the inner shell expands the variables
  setsid bash -c 'trap : TERM; echo $$ >"$0/pid"; .venv/bin/python "$@"; echo $? >"$0/exit"' \
    "$home/run" "$@" >>"$home/run/log" 2>&1 </dev/null &
  while [ ! -s "$home/run/pid" ]; do sleep 0.1; done
}

status() {
  local code
  if alive; then
    echo "$HOSTNAME: running"
  elif [ -e "$home/run/stopped" ]; then
    echo "$HOSTNAME: stopped"
  elif [ -s "$home/run/exit" ]; then
    code=$(cat "$home/run/exit")
    if [ "$code" = 0 ]; then echo "$HOSTNAME: finished"; else echo "$HOSTNAME: failed with exit code $code"; fi
  elif [ -s "$home/run/pid" ]; then
    echo "$HOSTNAME: failed, killed"
  else
    echo "$HOSTNAME: none"
  fi
}

stop() {
  local pid waited
  if ! alive; then return; fi
  pid=$(cat "$home/run/pid")
  touch "$home/run/stopped" # a stopped run exits with code 0 too, but is not finished
  kill -TERM -- "-$pid"
  for ((waited = 0; waited < 300; waited++)); do
    if ! alive; then return; fi
    sleep 0.2
  done
  kill -KILL -- "-$pid"
}

case ${1-} in
  setup | start | status | stop) "$@" ;;
  *) echo "error: unexpected ${1-nothing}; use setup, start, status or stop" >&2 && exit 2 ;;
esac
