# shellcheck shell=bash
# Sourced by the scripts that run the trainer as their child: hands a signal on to it, ends it when the script is killed, and tells a
# run that is finished from one that was stopped and saved, and both from one that some code ended with code 0.
# shellcheck disable=SC2034 # the sourcing scripts read these variables

SAVED=75 # exit code of a run that was stopped and saved, for which the trainer's own is 0
told=''  # signal that the script has got: TERM, INT or HUP
presses=0

# is_final CODE: succeeds if starting the run again would end in the same way (gspo_jax/exits.py).
is_final() {
  case $1 in
    2 | 5 | 6 | 7) ;; # wrong input, diverged, folder taken by another run, rewards that fail for good
    *) return 1 ;;
  esac
}

# stop_seconds FLAGS…: prints after how many seconds a stop is forced: well after the trainer would give up (processes.grace_s).
stop_seconds() {
  local flag grace=30
  for flag in "$@"; do
    case $flag in --config.processes.grace_s=[0-9]*) grace=${flag#*=} ;; esac
  done
  echo $((${grace%%.*} + 30))
}

# on_signals COMMAND: from now on runs COMMAND at each SIGTERM, SIGHUP and Ctrl-C, which are noted in `told` and `presses`.
on_signals() {
  # shellcheck disable=SC2064 # COMMAND is known now
  trap "told=TERM; $1" TERM
  # shellcheck disable=SC2064
  trap "told=HUP; $1" HUP
  # shellcheck disable=SC2064
  trap "told=INT; presses=\$((presses + 1)); $1" INT
}

# as_child FOLDER COMMAND…: replaces this subshell by a trainer, which ends with the script and says in FOLDER how it has ended.
# It hears a Ctrl-C itself, too, which it counts; bash has its background commands ignore it otherwise.
as_child() {
  export GSPO_JAX_PARENT=$parent GSPO_JAX_ENDED=$1
  shift
  trap - INT
  exec "$@"
}

# ended CODE FOLDER: returns CODE, or for code 0 what the trainer has written: SAVED or, if it has written nothing, 1.
ended() {
  if [ "$1" != 0 ] || [ -e "$2/finished.json" ]; then return "$1"; fi
  if [ -e "$2/stopped.json" ]; then return $SAVED; fi
  tell "error: the trainer ended with exit code 0, but its run is neither finished nor saved: some code ended the process"
  return 1
}

# supervise COMMAND…: runs the trainer, and returns its exit code, or SAVED. The first signal is handed on to the trainer as a
# SIGTERM, on which it saves the run; a third Ctrl-C kills it.
supervise() {
  local child='' code signals=0 before parent=$BASHPID scratch
  scratch=$(mktemp -d) || return 1
  on_signals hand_on
  (as_child "$scratch" "$@") &
  child=$!
  if [ "$signals" -gt 0 ]; then kill -TERM "$child"; fi # it came before there was a child
  while true; do
    before=$signals
    code=0
    wait "$child" || code=$?
    if [ "$signals" = "$before" ]; then break; fi # else the signal has ended the wait, not the child
  done
  trap - TERM INT HUP
  ended "$code" "$scratch" || code=$?
  rm -rf "$scratch"
  return "$code"
}

# Sends SIGTERM to the child of `supervise`, the first time.
hand_on() {
  signals=$((signals + 1))
  if [ -z "$child" ]; then return; fi
  if [ "$signals" = 1 ]; then kill -TERM "$child" 2>/dev/null || true; fi
  if [ "$presses" -ge 3 ]; then kill -KILL "$child" 2>/dev/null || true; fi
}

# tell TEXT: prints a line, if there still is a terminal or another end of the pipe.
tell() {
  trap '' PIPE
  echo "$1" >&2 || true
}

# train COMMAND…: runs the trainer, and goes on with the script only if the run is finished. Ends it with 0 if the run is saved.
train() {
  local code=0
  supervise "$@" || code=$?
  if [ "$code" = 0 ]; then return; fi
  if [ "$code" = "$SAVED" ]; then
    tell "the run is saved; start it again with the same command"
    code=0
  fi
  exit "$code"
}
