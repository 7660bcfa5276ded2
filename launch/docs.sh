#!/usr/bin/env bash
# Builds the documentation site from docs/ and the docstrings into site/: bash launch/docs.sh
# A broken link or any other warning fails the build. `bash launch/docs.sh serve [--dev-addr=HOST:PORT]` shows the site and rebuilds
# it at every change. Makes .venv first where it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh

ensure_venv docs
export NO_MKDOCS_2_WARNING=1 # a notice of the theme, about another tool
if [ "${1:-}" = serve ]; then
  exec .venv/bin/python -m mkdocs "$@"
fi
exec .venv/bin/python -m mkdocs build --strict "$@"
