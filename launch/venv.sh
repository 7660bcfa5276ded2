# shellcheck shell=bash
# Sourced by the other scripts, which set -euo pipefail: creates .venv with the newest supported Python that works, and installs
# the project, with the versions of launch/constraints.txt. The next call completes an interrupted install, and installs again what
# pyproject.toml or the constraints have changed. PYTHON=/path/to/python selects another interpreter.

unset PYTHONDONTWRITEBYTECODE # the install leaves compiling to the first import, which must keep what it compiled

SUPPORTED="3.13 3.12 3.11"
EXTRAS="report test slow" # each includes those before it; slow includes tpu too, docs is apart

PROBE='
import sys, sysconfig
import bz2, ctypes, ensurepip, lzma, sqlite3, ssl, venv  # missing from builds made without the headers, or on Debian
ok = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
sys.exit(0 if ok and "%d.%d" % sys.version_info[:2] in sys.argv[1].split() else 1)
'

# runs_as PYTHON VERSIONS: succeeds if the interpreter works (a pyenv shim may exist and fail), is of one of these versions, and
# has every module that an install needs.
runs_as() {
  "$1" -c "$PROBE" "$2" >/dev/null 2>&1 </dev/null
}

# Prints the newest supported Python, looking by name on PATH, in pyenv, in uv, and then at python3 and python.
pick_python() {
  local version candidate
  if [ -n "${PYTHON:-}" ]; then
    if runs_as "$PYTHON" "$SUPPORTED"; then command -v "$PYTHON" && return; fi
    echo "error: PYTHON=$PYTHON is not a working Python ${SUPPORTED// /, }; choose another or unset PYTHON" >&2
    return 1
  fi
  for version in $SUPPORTED; do
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python \
      "$(uv python find "$version" 2>/dev/null)" python3 python; do
      if [ -n "$candidate" ] && runs_as "$candidate" "$version"; then command -v "$candidate" && return; fi
    done
  done
  echo "error: no working Python ${SUPPORTED// /, } was found; install one, or set PYTHON=/path/to/python" >&2
  return 1
}

# Shows pip's output as one updating line on a terminal, and as a line every 20 seconds elsewhere.
show_install() {
  local line shown=$SECONDS
  while IFS= read -r line; do
    if [ -t 1 ]; then
      printf '\r\033[K  %3d s  %s' "$SECONDS" "${line:0:68}"
    elif [ $((SECONDS - shown)) -ge 20 ]; then
      shown=$SECONDS
      echo "  $SECONDS s  ${line:0:100}"
    fi
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

# installed EXTRA: succeeds if .venv has the extra as the current pyproject.toml and constraints define it.
installed() {
  local stamp holders
  case $1 in
    tpu) holders=slow ;;
    docs) holders='' ;;
    *) holders=${EXTRAS#*"$1"} ;;
  esac
  for stamp in "$1" $holders; do
    if [ "$(cat ".venv/installed-$stamp" 2>/dev/null)" = "$(install_state)" ]; then
      .venv/bin/python -c "" >/dev/null 2>&1 && return
    fi
  done
  return 1
}

# Prints a fingerprint of an install: the requirements, their versions, and the folder, since a moved .venv points to the old one.
install_state() {
  echo "$(cat pyproject.toml launch/constraints.txt | cksum) $PWD"
}

# Creates .venv unless there is a working one; if only pip is missing, adds it.
make_venv() {
  local python
  if .venv/bin/python -m pip --version >/dev/null 2>&1; then return; fi
  if .venv/bin/python -m ensurepip --upgrade >/dev/null 2>&1 && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    return
  fi
  python=$(pick_python)
  echo "creating .venv with $("$python" --version) ($python)"
  "$python" -m venv --clear .venv
}

# pip_install ARGUMENTS…: installs into .venv, with the versions of launch/constraints.txt.
# --no-compile halves the time: of thousands of modules, only those that are imported are ever compiled.
pip_install() {
  .venv/bin/python -m pip install --disable-pip-version-check --no-input --no-compile -c launch/constraints.txt "$@"
}

# ensure_venv EXTRA: makes sure that .venv has the project with that extra, as an editable install.
ensure_venv() {
  if installed "$1"; then return; fi
  mkdir -p .venv
  if command -v flock >/dev/null; then # of two concurrent scripts, the second waits and finds the work done
    exec 9<.venv
    flock 9
  fi
  if ! installed "$1"; then
    make_venv
    echo "installing gspo_jax[$1] into .venv: takes a few minutes the first time"
    if ! pip_install -e ".[$1]" 2>&1 9<&- | tee .venv/install.log | show_install; then
      tail -n 20 .venv/install.log >&2
      echo "error: the install failed; see above and .venv/install.log, fix the cause and run the same command again" >&2
      exit 1
    fi
    install_state >".venv/installed-$1"
  fi
  exec 9<&-
}
