#!/usr/bin/env bash
# Trains on this machine and draws the report: bash launch/local.sh [flags of gspo_jax.train …]
# Without flags: configs/tiny.py into runs/tiny. With another --config: into runs/NAME, or --workdir. Relative paths are taken
# from the repository. Makes .venv first where it is missing. Run it again to go on with a run that was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/flags.sh
source launch/flags.sh

complete_flags "$@"
ensure_venv report
.venv/bin/python -m gspo_jax.train ${defaults[@]+"${defaults[@]}"} "$@"
.venv/bin/python -m gspo_jax.report "$workdir"
