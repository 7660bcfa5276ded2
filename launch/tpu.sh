#!/usr/bin/env bash
# Trains on Cloud TPU VMs: bash launch/tpu.sh COMMAND --project=PROJECT --zone=ZONE --name=NAME [--dry-run] …
#
#   create    --type=v5e-8 [--slices=N] [--spot | --reserved | --flex-start=10h] [--runtime=VERSION] [--gcloud=FLAG …]
#                                                      requests the TPUs
#   wait      [--poll=SECONDS]                         waits until they are active
#   push                                               copies the committed tree to all workers
#   setup     [--fetch=gs://BUCKET/FOLDER …]           installs it there; FOLDER becomes ../fetched/NAME of the run
#   run       --config=FILE[:arg] --workdir=gs://BUCKET/RUN [--config.a.b=value …] [--env=NAME=VALUE …]
#                                                      starts or resumes the run on all workers
#   status                                             shows the state of the TPUs, and of the run on every worker
#   logs      [--node=N] [--worker=N]                  follows a worker's output, from its last 200 lines on
#   exec      -- COMMAND …                             runs a command on all workers, in the repository there
#   stop                                               saves and stops the run on all workers; babysit then ends, too
#   delete                                             releases the TPUs
#   babysit   the flags of create, setup and run, [--tries=N] [--poll=SECONDS] [--elastic=MINUTES]
#             does all of that until the run is finished, and then deletes the TPUs. After a preemption it requests new TPUs, and the
#             run resumes from its newest checkpoint. Gives up after N consecutive attempts (default 5) without a new checkpoint,
#             and if the run fails for good: wrong input, or diverged. With --elastic, a run with a checkpoint whose slices are not
#             active MINUTES after they were requested goes on with one less (or the next number that the config fits), with the
#             same global batch. After the next preemption it requests all of them again
#
# --dry-run prints the commands, as they can be pasted, and runs nothing but a check of the config on this machine, by its fields and
# mesh; gspo-jax plan tells whether it fits. docs/tpu.md is the full guide. Several slices form one run: a queued resource passes the MEGASCALE_ variables to its VMs as metadata
# (https://cloud.google.com/tpu/docs/multislice-introduction), where jax finds them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/cloud.sh
source launch/cloud.sh

COMMANDS='create wait push setup run status logs exec stop delete babysit'
SOURCE=build/gspo_jax.tar.gz
reserved=''
flex=''  # longest duration of TPUs by flex-start
track=() # alpha, where gcloud has the command there alone
runtime=''
gcloud_flags=()
environment=() # environment variables of the run, NAME=VALUE
poll=60
tries=5
elastic='' # minutes
fits=()    # with it: smaller numbers of slices that the config fits, from the largest on
node=0
worker=0
remote=() # command of exec

read_flags() {
  while [ $# -gt 0 ]; do
    case $1 in
      --reserved) reserved=yes ;;
      --runtime=?*) runtime=${1#*=} ;;
      --gcloud=--?*) gcloud_flags+=("${1#*=}") ;;
      --flex-start=?*) flex=${1#*=} ;;
      --env=[A-Z_]*=*) environment+=("${1#*=}") ;;
      --poll=*) poll=${1#*=} ;;
      --tries=*) tries=${1#*=} ;;
      --elastic=?*) elastic=${1#*=} ;;
      --node=*) node=${1#*=} ;;
      --worker=*) worker=${1#*=} ;;
      --help | -h) show_help launch/tpu.sh && exit 0 ;;
      --) shift && remote=("$@") && return ;;
      *) read_flag "$1" || refuse "unexpected $1; bash launch/tpu.sh --help lists the flags of each command" ;;
    esac
    shift
  done
}

check_flags() {
  check_name
  check_place
  require_form --poll "$poll" '[0-9]{1,4}' "give seconds, such as --poll=60"
  require_form --tries "$tries" '[1-9][0-9]{0,3}' "give a number of attempts, such as --tries=5"
  require_form --node "$node" '[0-9]{1,4}' "give the number of a slice, such as --node=0"
  require_form --worker "$worker" '[0-9]{1,4}' "give the number of a worker, such as --worker=0"
  case $1 in
    create | babysit)
      check_type
      without_tpu7x tpu.sh
      case "${spot:+x}${reserved:+x}${flex:+x}" in
        xx*) refuse "--spot, --reserved and --flex-start exclude each other; use one, or none for on-demand TPUs" ;;
      esac
      if [ -n "$flex" ]; then require_form --flex-start "$flex" '[1-9][0-9]*[dhm]' "give the longest duration, such as --flex-start=10h"; fi
      ;;
  esac
  if [ -n "$elastic" ]; then check_elastic "$1"; fi
  case $1 in
    run | babysit) check_train && check_config ;;
    *) if [ ${#train[@]} -gt 0 ]; then refuse "$1 takes no ${train[0]}; only run and babysit do"; fi ;;
  esac
  case $1 in push | babysit) require_tree ;; esac
  if [ -n "$elastic" ]; then check_fewer; fi
  if [ "$1" = exec ] && [ ${#remote[@]} = 0 ]; then refuse "exec has no command; give one after --, such as -- uptime"; fi
  if [ "$1" != exec ] && [ ${#remote[@]} -gt 0 ]; then refuse "$1 takes no command after --; only exec does"; fi
}

# check_elastic COMMAND: checks --elastic by itself.
check_elastic() {
  if [ "$1" != babysit ]; then refuse "$1 takes no --elastic=$elastic; only babysit does"; fi
  require_form --elastic "$elastic" '[1-9][0-9]{0,3}' "give minutes, such as --elastic=30"
  if [ "$slices" = 1 ]; then refuse "--elastic=$elastic has no slice to go on without; request several, such as --slices=2, or leave it out"; fi
}

# Sets `fits`. Without the project on this machine, a dry run takes the config to fit any number of slices.
check_fewer() {
  local count said here='' why=''
  if is_here; then
    here=yes
  elif [ -z "$dry" ]; then
    refuse "--elastic=$elastic needs .venv on this machine to check the config for fewer slices; make it with bash launch/local.sh"
  fi
  if [ -z "$dry" ]; then check_for "$slices" || exit; fi
  for ((count = slices - 1; count > 0; count--)); do
    if [ -z "$here" ] || said=$(check_for "$count" 2>&1); then
      fits+=("$count")
    else
      why="for $count: ${said##*error: }"
    fi
  done
  if [ ${#fits[@]} = 0 ]; then refuse "--elastic=$elastic finds no smaller number of slices that the config fits; $why"; fi
}

# resources COMMAND ARGUMENT …: runs gcloud's queued-resources command in the project and zone.
resources() {
  local command=$1
  shift
  run gcloud ${track[@]+"${track[@]}"} compute tpus queued-resources "$command" "$@" --project="$project" --zone="$zone"
}

# on_all_workers COMMAND WORD …: runs a command on every worker of every slice.
on_all_workers() {
  local joined
  join "$@"
  resources ssh "$name" --node=all --worker=all --command="$joined"
}

# Prints the VM image of the TPU generation: https://cloud.google.com/tpu/docs/runtimes
default_runtime() {
  case $type in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

create() {
  local track=() flags=(--accelerator-type="$type" --runtime-version="${runtime:-$(default_runtime)}")
  if [ "$slices" -gt 1 ]; then
    flags+=(--node-count="$slices" --node-prefix="$name")
  else
    flags+=(--node-id="$name")
  fi
  if [ -n "$spot" ]; then flags+=(--spot); fi
  if [ -n "$reserved" ]; then flags+=(--reserved); fi
  if [ -n "$flex" ]; then
    track=(alpha)
    flags+=(--provisioning-model=flex-start --max-run-duration="$flex")
  fi
  resources create "$name" "${flags[@]}" ${gcloud_flags[@]+"${gcloud_flags[@]}"}
}

# Prints the state of the queued resource, or NONE if it does not exist.
state() {
  local said
  if said=$(resources describe "$name" --format='value(state.state)' 2>&1); then
    grep -xE '[A-Z_]+' <<<"$said" | tail -n 1 # drops warnings
  elif [[ $said == *NOT_FOUND* || $said == *"not found"* ]]; then
    echo NONE
  else
    echo "$said" >&2
    return 1
  fi
}

wait_for() {
  local now seen=''
  if [ -n "$dry" ]; then
    resources describe "$name" --format='value(state.state)'
    return
  fi
  while true; do
    now=$(state)
    if [ "$now" != "$seen" ]; then echo "$(date +%T) $name is $now" && seen=$now; fi
    case $now in
      ACTIVE) return ;;
      CREATING | ACCEPTED | PROVISIONING | WAITING_FOR_RESOURCES) sleep "$poll" ;;
      *) echo "error: $name is $now and will not become ACTIVE; delete it and create it again" >&2 && exit 1 ;;
    esac
  done
}

# Replaces the tree on all workers, but keeps the old tree's .venv.
push() {
  local unpack='rm -rf gspo_jax.new && mkdir gspo_jax.new && tar -xzf gspo_jax.tar.gz -C gspo_jax.new'
  unpack+=' && if [ -d gspo_jax/.venv ]; then mv gspo_jax/.venv gspo_jax.new/; fi && rm -rf gspo_jax && mv gspo_jax.new gspo_jax'
  archive "$SOURCE" tar.gz &&
    resources scp "$SOURCE" "$name:gspo_jax.tar.gz" --node=all --worker=all &&
    resources ssh "$name" --node=all --worker=all --command="$unpack"
}

setup() {
  on_all_workers bash gspo_jax/launch/worker.sh setup ${fetch[@]+"${fetch[@]%/}"}
}

start() {
  on_all_workers ${environment[@]+env "${environment[@]}"} bash gspo_jax/launch/worker.sh start -m gspo_jax.train "${train[@]}"
}

# Prints one line per worker, from worker.sh status.
run_status() {
  # shellcheck disable=SC2016 # the worker expands it
  resources ssh "$name" --node=all --worker=all --command='bash gspo_jax/launch/worker.sh status 2>/dev/null || echo "$HOSTNAME: none"'
}

# Prints the number of the newest checkpoint in the bucket, or nothing.
newest_checkpoint() {
  gcloud storage ls "$workdir/checkpoints/" 2>/dev/null | sed -n 's|.*/\([0-9][0-9]*\)/$|\1|p' | sort -n | tail -n 1
}

# Counts an attempt, and exits with an error after too many without a new checkpoint.
attempts=0
checkpoint=''
count_attempt() {
  local now
  now=$(newest_checkpoint)
  if [ "$now" != "$checkpoint" ]; then attempts=0 && checkpoint=$now; fi
  if [ "$attempts" -ge "$tries" ]; then
    echo "error: $attempts consecutive attempts made no new checkpoint in $workdir; see bash launch/tpu.sh logs, then delete" >&2
    exit 1
  fi
  attempts=$((attempts + 1))
}

log() {
  echo "$(date +%T) $*"
}

# Stops what is left of the run, and starts it from the tree that is committed now.
begin() {
  on_all_workers bash gspo_jax/launch/worker.sh end || true # a new machine has no worker.sh yet
  push && setup && start
}

# restart STATUSES: starts the run anew, after its last end.
restart() {
  printf '%s\n' "$1"
  count_attempt
  begin || log "the run could not be started"
}

# Counts a request that failed as an attempt, unless fewer slices will be requested.
count_request() {
  if ! can_shrink; then count_attempt; fi
}

# Prints the next smaller number of slices that the config fits, or nothing.
fewer() {
  local count
  for count in ${fits[@]+"${fits[@]}"}; do
    if [ "$count" -lt "$slices" ]; then echo "$count" && return; fi
  done
}

# Succeeds if the run can go on with fewer slices: with --elastic, and from a checkpoint.
can_shrink() {
  [ -n "$(fewer)" ] && [ -n "$(newest_checkpoint)" ]
}

# Succeeds if requested TPUs have not become ACTIVE in time, and the run can go on with fewer slices.
is_late() {
  [ -n "$elastic" ] && [ -n "$requested" ] && [ $(($(date +%s) - requested)) -ge $((60 * elastic)) ] && can_shrink
}

# Has fewer slices requested from now on.
shrink() {
  log "$name was not ACTIVE within $elastic minutes: $(fewer) of $most slices are requested instead of $slices"
  slices=$(fewer) requested=''
}

release() {
  if ! resources delete "$name" --force --quiet; then log "$name could not be deleted" && return 1; fi
}

# check_and_act: one round of babysitting. Looks at the TPUs and the run, does what is due, and succeeds once the run is finished.
last=''
requested='' # when so many slices were first requested, in seconds since 1970, unless they were ACTIVE since
most=''      # slices to request after a preemption
check_and_act() {
  local now seen
  now=$(state) || return 1 # no answer: try again in the next round
  if [ "$now" != "$last" ]; then log "$name is $now" && last=$now; fi
  case $now in
    NONE)
      if is_late; then shrink; fi # earlier requests have failed
      requested=${requested:-$(date +%s)}
      if ! create; then log "$name could not be created" && count_request; fi
      ;;
    CREATING | ACCEPTED | PROVISIONING | WAITING_FOR_RESOURCES)
      requested=${requested:-$(date +%s)}
      if is_late && release; then shrink; fi
      ;;
    SUSPENDED | FAILED) # preempted, or the request failed
      if [ "$now" = FAILED ]; then count_request; fi
      release
      ;;
    ACTIVE)
      slices=$most requested=''
      seen=$(run_status) || return 1 # workers stop answering before the preemption shows
      case $seen in
        *': failed for good'*)
          printf '%s\n' "$seen"
          echo "error: the run would fail again in the same way; see bash launch/tpu.sh logs, then delete" >&2
          exit 1
          ;;
        *': stopped'*)
          printf '%s\n' "$seen"
          echo "error: the run was stopped by tpu.sh stop; start it with run or babysit, or release the TPUs with delete" >&2
          exit 1
          ;;
        *': none'* | *': failed'*) restart "$seen" ;;
        *': running'*) ;;
        *': saved'*) restart "$seen" ;; # by all workers: a preemption was announced
        *': finished'*) return ;;
      esac
      ;;
    *) ;; # being deleted
  esac
  return 1
}

babysit() {
  if [ -n "$dry" ]; then
    echo "# every $poll s until the run is finished:"
    resources describe "$name" --format='value(state.state)'
    echo "# if the TPUs do not exist:"
    create
    echo "# if they are ACTIVE:"
    run_status
    echo "# if the run has not been started on them, was saved before a preemption that did not come, or has failed:"
    begin
    if [ -n "$elastic" ]; then
      echo "# if they are not ACTIVE $elastic minutes after they were requested, and the run has a checkpoint, with fewer slices; the config fits ${fits[*]}:"
      release
      slices=${fits[0]}
      create
    fi
    echo "# if they were preempted or could not be created, and at the end:"
    release
    return
  fi
  most=$slices
  state >/dev/null # a wrong project, zone or account fails here
  until check_and_act; do sleep "$poll"; done
  log "the run is finished"
  resources delete "$name" --force --quiet
}

command=${1-}
case " $COMMANDS --help -h " in
  *" ${command:-nothing} "*) ;;
  *) refuse "unexpected command '$command'; use one of ${COMMANDS// /, }" ;;
esac
case $command in -*) ;; *) shift ;; esac
read_flags "$@"
check_flags "$command"
require_tool gcloud https://cloud.google.com/sdk/docs/install
case $command in
  wait) wait_for ;;
  run) start ;;
  status)
    resources describe "$name" --format='value(state.state)'
    run_status
    ;;
  logs) resources ssh "$name" --node="$node" --worker="$worker" --command='tail -n 200 -F run/log' ;;
  exec)
    join "${remote[@]}"
    resources ssh "$name" --node=all --worker=all --command="cd gspo_jax && $joined"
    ;;
  stop) on_all_workers bash gspo_jax/launch/worker.sh stop ;;
  delete) resources delete "$name" --force --quiet ;;
  *) "$command" ;;
esac
