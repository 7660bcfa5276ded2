#!/usr/bin/env bash
# Trains with N processes on this machine, as the hosts of a pod would: bash launch/cpu_pod.sh N [flags of gspo_jax.train …]
# Flags and their defaults are those of launch/local.sh. The processes divide the simulated devices (--config.cpu_devices). The
# first one speaks here, the others into WORKDIR/processes/. When one dies, all are ended and started again, so that the run goes
# on from its newest checkpoint, RESTARTS times (3) at most; a mistake in the flags ends all at once. Ctrl-C ends all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/flags.sh
source launch/flags.sh

# How a process says that what it was told is wrong, and that another one is lost (gspo_jax/cli.py, gspo_jax/parallel/processes.py).
MISTAKEN=2
LOST=3

# begin FLAGS…: starts the processes; sets `pids`.
begin() {
  local port i output
  port=$($python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
  export JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$count
  pids=()
  for ((i = 0; i < count; i++)); do
    output=$workdir/processes/$i.log
    if [ "$i" = 0 ]; then
      JAX_PROCESS_ID=$i $python -m gspo_jax.train "$@" &
    else
      JAX_PROCESS_ID=$i $python -m gspo_jax.train "$@" >>"$output" 2>&1 &
    fi
    pids+=($!)
  done
}

# Returns when all processes have ended, or with the code of the first that has failed; sets `failed` to which one. That is the
# one that the others have lost, although they may be seen to end before it.
watch() {
  local left=$count i code ended='' lost='' before
  while [ "$left" -gt 0 ]; do
    before=$lost
    for ((i = 0; i < count; i++)); do
      case $ended in *" $i "*) continue ;; esac
      if kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
      code=0
      wait "${pids[i]}" || code=$?
      ended+=" $i "
      case $code in
        0) left=$((left - 1)) ;;
        "$LOST") lost=$i ;;
        *) failed=$i && return "$code" ;;
      esac
    done
    if [ -n "$before" ]; then failed=$before && return "$LOST"; fi
    sleep 0.2
  done
}

# Ends the processes that still run: asks them, and after five seconds does not ask.
end_all() {
  local patience=50
  while [ "$patience" -gt 0 ] && kill "${pids[@]}" 2>/dev/null; do
    patience=$((patience - 1))
    sleep 0.1
  done
  kill -9 "${pids[@]}" 2>/dev/null || true
  wait "${pids[@]}" 2>/dev/null || true
}

count=${1:-}
case $count in
  '' | *[!0-9]* | 0*)
    echo "error: the first argument is ${count:-missing}; say how many processes: bash launch/cpu_pod.sh 2 [flags …]" >&2
    exit $MISTAKEN
    ;;
esac
shift
complete_flags "$@"
set -- ${defaults[@]+"${defaults[@]}"} "$@"
ensure_venv report
python=.venv/bin/python
mkdir -p "$workdir/processes"
pids=()
trap 'end_all; exit 130' INT
trap 'end_all; exit 143' TERM

for ((restarts = ${RESTARTS:-3}; ; restarts--)); do
  begin "$@"
  code=0
  watch || code=$?
  if [ "$code" = 0 ]; then break; fi
  end_all
  if [ "$code" = "$MISTAKEN" ] || [ "$restarts" -lt 1 ]; then
    echo "error: process $failed of $count has ended with code $code; see above, and $workdir/processes" >&2
    exit "$code"
  fi
  echo "process $failed of $count has ended with code $code: all start again, the run goes on from its newest checkpoint" >&2
done
$python -m gspo_jax.report "$workdir"
