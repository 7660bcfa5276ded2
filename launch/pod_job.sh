#!/usr/bin/env bash
# Runs the trainer as the job of a cluster, on behalf of gke.sh and sky.sh: bash launch/pod_job.sh python -m gspo_jax.train FLAGS…
# Exits with the trainer's code, or with 75 if the run was stopped and saved: to a cluster, 0 would say that it is finished.
set -uo pipefail
# shellcheck source=launch/trainer.sh
source "$(dirname "${BASH_SOURCE[0]}")/trainer.sh"

supervise "$@"
