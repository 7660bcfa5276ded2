#!/usr/bin/env bash
# Trains on the TPUs of a GKE cluster, using xpk (https://github.com/AI-Hypercomputer/xpk):
#   bash launch/gke.sh --project=PROJECT --zone=ZONE --cluster=CLUSTER --name=NAME --type=v5e-8 [--slices=N]
#     --config=FILE[:arg] --workdir=gs://BUCKET/RUN [--config.a.b=value …] [--fetch=gs://BUCKET/FOLDER …] [--image=IMAGE]
#     [--restarts=N] [--dry-run]
#
# The committed tree is packed into a container based on IMAGE (default python:3.12), which at start-up installs it, and copies each
# FOLDER to ../fetched/NAME of the run. A workload that is preempted or fails is restarted, at most N times (default 50), and resumes
# from its newest checkpoint, unless it fails for good: wrong input, or diverged. Manage it with xpk workload list and xpk workload
# delete. --dry-run prints the commands, and runs nothing but a check of the config on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/cloud.sh
source launch/cloud.sh
# shellcheck source=launch/trainer.sh
source launch/trainer.sh

TREE=build/gspo_jax
RESTART_ON=1,3,4,$SAVED # besides xpk's own, 42 and 127 to 255, which include deaths by signal
cluster=''
image=python:3.12
restarts=50
for flag in "$@"; do
  case $flag in
    --cluster=?*) cluster=${flag#*=} ;;
    --image=?*) image=${flag#*=} ;;
    --restarts=*) restarts=${flag#*=} ;;
    --help | -h) show_help launch/gke.sh && exit 0 ;;
    --spot) refuse "--spot is a property of the cluster; leave it out here, and use xpk cluster create --spot" ;;
    *) read_flag "$flag" || refuse "unexpected $flag; bash launch/gke.sh --help lists the flags" ;;
  esac
done
check_name
check_place
check_type
require_form --cluster "$cluster" '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' "give the name of a GKE cluster created by xpk, such as --cluster=pods"
require_form --restarts "$restarts" '[0-9]{1,4}' "give a number, such as --restarts=50"
check_train
check_config
require_tool xpk https://github.com/AI-Hypercomputer/xpk
require_tree

command="python -m pip install --quiet -c launch/constraints.txt -e '.[tpu]'"
if [ ${#fetch[@]} -gt 0 ]; then
  join "${fetch[@]%/}"
  command+=" && bash launch/worker.sh fetch $joined"
fi
join "${train[@]}"
command+=" && exec bash launch/pod_job.sh python -m gspo_jax.train $joined"
archive "$TREE.tar" tar
run rm -rf "$TREE"
run mkdir "$TREE"
run tar -xf "$TREE.tar" -C "$TREE"
run xpk workload create --workload="$name" --cluster="$cluster" --project="$project" --zone="$zone" \
  --tpu-type="$type" --num-slices="$slices" --max-restarts="$restarts" --restart-on-exit-codes="$RESTART_ON" \
  --termination-grace-period-seconds="$(stop_seconds "${train[@]}")" \
  --base-docker-image="$image" --script-dir="$TREE" \
  --command="$command"
