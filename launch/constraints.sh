#!/usr/bin/env bash
# Writes launch/constraints.txt, the versions that every install takes: bash launch/constraints.sh [flags of uv pip compile …]
# One for each package that an extra of pyproject.toml needs, for every supported Python and system. Versions that still fit stay;
# --upgrade takes the newest of all, --upgrade-package=NAME that of one. Commit the file, and run the tests with what it brings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh

ensure_venv test
exec .venv/bin/uv pip compile pyproject.toml --all-extras --universal --python-version=3.11 --no-annotate --no-emit-index-url \
  --custom-compile-command="bash launch/constraints.sh" --quiet --output-file=launch/constraints.txt "$@"
