#!/usr/bin/env bash
# Trains on TPU VMs found by SkyPilot (https://docs.skypilot.co), as a managed job that recovers from preemptions:
#   bash launch/sky.sh --name=NAME --type=v5e-8 [--zone=ZONE] [--spot]
#     --config=FILE[:arg] --workdir=gs://BUCKET/RUN [--config.a.b=value …] [--fetch=gs://BUCKET/FOLDER …] [--dry-run]
#
# launch/sky.yaml defines the job. Every machine copies each FOLDER to ../fetched/NAME of the run. The project is taken from gcloud's configuration. A recovered job resumes from its newest
# checkpoint. Manage it with sky jobs queue, logs and cancel. --dry-run prints the command, and runs nothing but a check of
# the config on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/cloud.sh
source launch/cloud.sh

for flag in "$@"; do
  case $flag in
    --help | -h) show_help launch/sky.sh && exit 0 ;;
    --project=*) refuse "sky.sh takes no $flag; set the project with gcloud config set project" ;;
    --slices=*) refuse "sky.sh takes no $flag, as a job has one slice; use tpu.sh or gke.sh for several" ;;
    *) read_flag "$flag" || refuse "unexpected $flag; bash launch/sky.sh --help lists the flags" ;;
  esac
done
check_name
check_type
without_tpu7x sky.sh
where=gcp
if [ -n "$zone" ]; then
  require_form --zone "$zone" '[a-z]+-[a-z]+[0-9]+-[a-z]' "give the zone of your quota, such as --zone=us-east5-a"
  where=gcp/${zone%-*}/$zone
fi
check_train
check_config
require_tool sky https://docs.skypilot.co/en/latest/getting-started/installation.html

join "${train[@]}"
flags=(--name="$name" --infra="$where" --gpus="tpu-$type" --env="TRAIN=$joined")
if [ ${#fetch[@]} -gt 0 ]; then
  join "${fetch[@]%/}"
  flags+=(--env="FETCH=$joined")
fi
if [ -n "$spot" ]; then flags+=(--use-spot); fi
run sky jobs launch "${flags[@]}" --yes --detach-run launch/sky.yaml
