# shellcheck shell=bash
# Sourced by the scripts that run the trainer as their child: hands a signal on to it, ends it when the script is killed, and tells a
# run that was stopped and saved from one that is finished.
# shellcheck disable=SC2034 # the sourcing scripts read these variables

SAVED=75 # exit code of a run that was stopped and saved, for which the trainer's own is 0
told=''  # signal that the script has got: TERM or INT

# is_final CODE: succeeds if starting the run again would end in the same way (gspo_jax/exits.py).
is_final() {
  case $1 in
    2 | 5 | 6) ;; # wrong input, diverged, folder taken by another run
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

# supervise COMMAND…: runs the trainer, and returns its exit code, or SAVED. The first SIGTERM or Ctrl-C is handed on to the trainer
# as a SIGTERM, on which it saves the run.
supervise() {
  local child='' code signals=0 before parent=$BASHPID scratch
  scratch=$(mktemp -d) || return 1
  trap 'told=TERM; hand_on' TERM
  trap 'told=INT; hand_on' INT
  GSPO_JAX_PARENT=$parent GSPO_JAX_STOPPED=$scratch/stopped.json "$@" &
  child=$!
  if [ "$signals" -gt 0 ]; then kill -TERM "$child"; fi # it came before there was a child
  while true; do
    before=$signals
    code=0
    wait "$child" || code=$?
    if [ "$signals" = "$before" ]; then break; fi # else the signal has ended the wait, not the child
  done
  trap - TERM INT
  if [ "$code" = 0 ] && [ -e "$scratch/stopped.json" ]; then code=$SAVED; fi
  rm -rf "$scratch"
  return "$code"
}

# Sends SIGTERM to the child of `supervise`, the first time.
hand_on() {
  signals=$((signals + 1))
  if [ "$signals" = 1 ] && [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; fi
}

# train COMMAND…: runs the trainer, and goes on with the script only if the run is finished.
train() {
  local code=0
  supervise "$@" || code=$?
  if [ "$code" = 0 ]; then return; fi
  if [ "$code" = "$SAVED" ]; then
    echo "the run is saved; start it again with the same command" >&2
    code=0
  fi
  if [ "$told" = INT ]; then code=130; fi
  exit "$code"
}
