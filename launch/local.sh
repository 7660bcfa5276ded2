#!/usr/bin/env bash
# Trains on this machine and writes a report: bash launch/local.sh [flags of gspo_jax.train …]
# Without flags, trains configs/tiny.py in runs/tiny; with another --config, in runs/NAME unless --workdir is given. Paths are
# relative to the repository. Creates .venv if it is missing. Ctrl-C, SIGTERM and a closed terminal save
# the run, and the same command resumes it; the exit code is 0 then, too, and WORKDIR/stopped.json says that it is not finished.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/flags.sh
source launch/flags.sh
# shellcheck source=launch/trainer.sh
source launch/trainer.sh

complete_flags "$@"
ensure_venv report
train .venv/bin/python -m gspo_jax.train ${defaults[@]+"${defaults[@]}"} "$@"
.venv/bin/python -m gspo_jax.report "$workdir"
