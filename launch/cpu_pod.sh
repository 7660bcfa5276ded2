#!/usr/bin/env bash
# Trains with N processes on this machine, as the hosts of a pod would: bash launch/cpu_pod.sh N [flags of gspo_jax.train …]
# Flags and defaults are those of launch/local.sh. The processes share the simulated devices (--config.cpu_devices). The first
# one prints here, the others to WORKDIR/processes/. If one dies, all are stopped and restarted, and the run resumes from its
# newest checkpoint, at most RESTARTS times (default 3), unless it would fail again: wrong flags, or diverged. Ctrl-C, SIGTERM and a
# closed terminal save the run and end it; a SIGTERM that only the processes get saves it too, and it is started again.
# With --elastic a pod goes on without a process that died, as one that has lost a host or a slice: the next smaller number of processes
# whose mesh the config fits, with as many devices each, and the same global batch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/flags.sh
source launch/flags.sh
# shellcheck source=launch/trainer.sh
source launch/trainer.sh

# Exit codes for wrong input and for a lost peer process (gspo_jax/exits.py).
MISTAKEN=2
LOST=3

# begin FLAGS…: starts the processes, whose ends are told in `scratch`, and sets `pids`.
begin() {
  local port i output parent=$$
  port=$($python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
  export JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$count
  pids=()
  rm -rf "${scratch:?}"/*
  for ((i = 0; i < count; i++)); do
    output=$workdir/processes/$i.log
    mkdir "$scratch/$i"
    if [ "$i" = 0 ]; then
      (JAX_PROCESS_ID=$i as_child "$scratch/$i" $python -m gspo_jax.train "$@" ${own[@]+"${own[@]}"}) &
    else
      (JAX_PROCESS_ID=$i as_child "$scratch/$i" $python -m gspo_jax.train "$@" ${own[@]+"${own[@]}"}) >>"$output" 2>&1 &
    fi
    pids+=($!)
  done
}

# Waits until all processes are finished, or returns the exit code of the one that failed first and sets `failed` to its number.
# Its peers exit with LOST, and may be seen to do so before it; only if no other failure shows is a lost peer reported. Returns SAVED
# once they have all ended, and some are saved. Once the script is told to stop, hands that on as one SIGTERM to each process.
watch() {
  local left=$count i code seen='' lost='' before looks='' saved=0
  while [ "$left" -gt 0 ]; do
    if [ -n "$told" ] && [ -z "$looks" ]; then
      looks=$((5 * stop_patience)) # five a second, as $SECONDS jumps with a clock that is set
      kill "${pids[@]}" 2>/dev/null || true
    elif [ "$presses" -ge 3 ] || { [ -n "$looks" ] && [ $((looks -= 1)) -lt 0 ]; }; then
      kill -9 "${pids[@]}" 2>/dev/null || true
    fi
    before=$lost
    for ((i = 0; i < count; i++)); do
      case $seen in *" $i "*) continue ;; esac
      if kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
      code=0
      wait "${pids[i]}" || code=$?
      seen+=" $i "
      ended "$code" "$scratch/$i" || code=$?
      case $code in
        0) left=$((left - 1)) ;;
        "$SAVED") left=$((left - 1)) saved=$SAVED ;;
        "$LOST") lost=$i ;;
        *) failed=$i && return "$code" ;;
      esac
    done
    if [ -n "$before" ]; then failed=$before && return "$LOST"; fi
    sleep 0.2
  done
  return $saved
}

# Ends the processes that are left after one has failed: by force after two seconds, as they cannot save without it.
end_all() {
  local patience=20
  while [ "$patience" -gt 0 ] && kill -0 "${pids[@]}" 2>/dev/null; do
    patience=$((patience - 1))
    sleep 0.1 || true # Ctrl-C ends it, too
  done
  kill -9 "${pids[@]}" 2>/dev/null || true
  wait "${pids[@]}" 2>/dev/null || true
}

count=${1:-}
case $count in
  '' | *[!0-9]* | 0*)
    echo "error: the first argument is ${count:-missing}; give the number of processes: bash launch/cpu_pod.sh 2 [flags …]" >&2
    exit $MISTAKEN
    ;;
esac
shift
elastic='' flags=()
for word in "$@"; do
  if [ "$word" = --elastic ]; then elastic=yes; else flags+=("$word"); fi
done
set -- ${flags[@]+"${flags[@]}"}
complete_flags "$@"
set -- ${defaults[@]+"${defaults[@]}"} "$@"
ensure_venv report
python=.venv/bin/python
pids=() own=() each=0
fits=() # with --elastic: smaller numbers of processes that the config fits, from the largest on
if [ -n "$elastic" ] && [ "$count" -gt 1 ]; then
  $python -m gspo_jax.train "$@" --check_for=0 >/dev/null || exit
  each=$(($($python -c 'import sys; from gspo_jax import cli; print(cli.read_config(sys.argv[1:]).cpu_devices)' "$@") / count))
  for ((left = count - 1; left > 0; left--)); do
    if said=$($python -m gspo_jax.train "$@" --check_for=$((each * left)) 2>&1); then fits+=("$left"); fi
  done
  if [ ${#fits[@]} = 0 ]; then
    echo "error: --elastic could not go on with fewer than $count processes; with 1: ${said##*error: }" >&2
    exit $MISTAKEN
  fi
fi
mkdir -p "$workdir/processes"
stop_patience=$(stop_seconds "$@")
restarts=${RESTARTS:-3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
on_signals :

while true; do
  begin "$@"
  code=0
  watch || code=$?
  if [ "$code" = 0 ]; then break; fi
  if [ "$code" = "$SAVED" ] && [ -z "$told" ]; then
    tell "the run was stopped and saved: starting it again"
    continue
  fi
  if [ "$code" = "$SAVED" ]; then
    tell "the run is saved; start it again with the same command"
    code=0
  else
    end_all
    if [ -z "$told" ] && [ "$restarts" -gt 0 ] && ! is_final "$code"; then
      restarts=$((restarts - 1))
      if [ ${#fits[@]} -gt 0 ]; then
        count=${fits[0]} fits=("${fits[@]:1}")
        own=("--config.cpu_devices=$((each * count))")
        tell "process $failed exited with code $code: going on with $count, $((each * count)) devices, from the newest checkpoint"
        continue
      fi
      tell "process $failed of $count exited with code $code: restarting all, the run resumes from its newest checkpoint"
      continue
    fi
    tell "error: process $failed of $count exited with code $code; see the output above and $workdir/processes"
  fi
  exit "$code"
done
trap - INT TERM HUP
$python -m gspo_jax.report "$workdir"
