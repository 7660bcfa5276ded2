#!/usr/bin/env bash
# Runs on a TPU VM on behalf of tpu.sh, in the home folder: bash gspo_jax/launch/worker.sh COMMAND …
#   setup [gs://BUCKET/FOLDER …]    installs the project, and copies each FOLDER to fetched/
#   fetch gs://BUCKET/FOLDER …      copies only, by gcloud, or without it by the package gcsfs
#   start ARGUMENT …                starts python ARGUMENT … in gspo_jax/ in the background; output goes to run/log
#   status                          prints one line: none, running, finished; saved: ended by a SIGTERM from elsewhere, as before a
#                                   preemption; stopped: ended by stop; failed, or failed for good, with the exit code
#   stop                            saves and ends the run, by force if that takes too long
#   end                             does so in order to start it again: its status is then saved, not stopped
# The run has a session of its own and survives a lost connection.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/trainer.sh
source launch/trainer.sh
home=$(dirname "$PWD")
mkdir -p "$home/run"

setup() {
  # shellcheck source=launch/venv.sh
  source launch/venv.sh
  PATH=$HOME/.local/bin:$PATH
  if [ ! -x .venv/bin/python ] && ! pick_python >/dev/null 2>&1; then # the image's Python may be too old
    python3 -m pip install --user --quiet -c launch/constraints.txt uv
    uv python install 3.12
  fi
  ensure_venv tpu
  if ! command -v bwrap >/dev/null; then # sandbox for rewards that run code
    sudo apt-get install -y -q bubblewrap || echo "note: bubblewrap could not be installed" >&2
  fi
  # libtpu starts and ends sooner with them
  echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled >/dev/null || echo "note: no huge pages" >&2
  fetch "$@"
}

fetch() {
  local source target python=.venv/bin/python
  if [ ! -x "$python" ]; then python=python; fi # of a container
  for source in "$@"; do
    target=$home/fetched/${source##*/}
    mkdir -p "$target"
    if command -v gcloud >/dev/null; then
      gcloud storage rsync --recursive "$source" "$target"
    else
      "$python" -c 'import sys, gcsfs; gcsfs.GCSFileSystem().get(sys.argv[1], sys.argv[2], recursive=True)' "$source/" "$target/"
    fi
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
  stop_seconds "$@" >"$home/run/patience"
  # shellcheck disable=SC2016 # the inner shell expands the variables
  setsid bash -c 'source launch/trainer.sh; echo $$ >"$0/pid"; supervise .venv/bin/python "$@"; echo $? >"$0/exit"' \
    "$home/run" "$@" >>"$home/run/log" 2>&1 </dev/null &
  while [ ! -s "$home/run/pid" ]; do sleep 0.1; done
}

status() {
  local code=''
  if [ -s "$home/run/exit" ]; then code=$(cat "$home/run/exit"); fi
  if alive; then
    echo "$HOSTNAME: running"
  elif [ "$code" = 0 ]; then
    echo "$HOSTNAME: finished"
  elif [ -e "$home/run/stopped" ]; then
    echo "$HOSTNAME: stopped, $(ended "$code")"
  elif [ "$code" = "$SAVED" ]; then
    echo "$HOSTNAME: saved"
  elif is_final "$code"; then
    echo "$HOSTNAME: failed for good with $(ended "$code")"
  elif [ -n "$code" ]; then
    echo "$HOSTNAME: failed with $(ended "$code")"
  elif [ -s "$home/run/pid" ]; then
    echo "$HOSTNAME: failed, killed"
  else
    echo "$HOSTNAME: none"
  fi
}

# ended CODE: puts the exit code of a run that is not finished into words.
ended() {
  case $1 in
    "$SAVED") echo saved ;;
    '') echo killed ;;
    *) echo "exit code $1" ;;
  esac
}

stop() {
  if alive; then touch "$home/run/stopped"; fi
  end
  status
}

end() {
  local pid patience looks
  if ! alive; then return; fi
  pid=$(cat "$home/run/pid")
  patience=$(cat "$home/run/patience")
  looks=$((5 * patience)) # five a second, as $SECONDS jumps with a clock that is set
  kill -TERM "$pid" # which hands it on to the trainer alone: its reward workers are needed until it has saved
  while alive; do
    looks=$((looks - 1))
    if [ "$looks" -lt 0 ]; then
      echo "$HOSTNAME: the run has not ended $patience s after SIGTERM, and is killed" >&2
      kill -KILL -- "-$pid" 2>/dev/null || true
      while alive; do sleep 0.1; done
    fi
    sleep 0.2
  done
}

case ${1-} in
  setup | fetch | start | status | stop | end) "$@" ;;
  *) echo "error: unexpected ${1-nothing}; use setup, fetch, start, status, stop or end" >&2 && exit 2 ;;
esac
