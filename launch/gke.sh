#!/usr/bin/env bash
# Trains on the TPUs of a GKE cluster, using xpk (https://github.com/AI-Hypercomputer/xpk):
#   bash launch/gke.sh --project=PROJECT --zone=ZONE --cluster=CLUSTER --name=NAME --type=v5p-128 [--slices=N]
#     --config=FILE[:arg] --workdir=gs://BUCKET/RUN [--config.a.b=value …] [--image=IMAGE] [--restarts=N] [--dry-run]
#
# The committed tree is packed into a container based on IMAGE (default python:3.12), which installs it at start-up. A workload that
# is preempted or fails is restarted, at most N times (default 50), and resumes from its newest checkpoint, unless it fails for
# good: wrong input, or diverged. Manage it with xpk workload list and xpk workload delete. --dry-run prints the commands, one per
# line, and runs nothing.
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

printf -v words '%q ' "${train[@]}"
archive "$TREE.tar" tar
run rm -rf "$TREE"
run mkdir "$TREE"
run tar -xf "$TREE.tar" -C "$TREE"
run xpk workload create --workload="$name" --cluster="$cluster" --project="$project" --zone="$zone" \
  --tpu-type="$type" --num-slices="$slices" --max-restarts="$restarts" --restart-on-exit-codes="$RESTART_ON" \
  --termination-grace-period-seconds="$(stop_seconds "${train[@]}")" \
  --base-docker-image="$image" --script-dir="$TREE" \
  --command="python -m pip install --quiet -c launch/constraints.txt -e '.[tpu]' && exec bash launch/pod_job.sh python -m gspo_jax.train ${words% }"
