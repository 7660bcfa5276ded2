# shellcheck shell=bash
# Sourced by the scripts beside it: how a command is run, or with --dry-run printed, and how a flag is refused.
# shellcheck disable=SC2034 # they set and read `dry`

dry=''

refuse() {
  echo "error: $1" >&2
  exit 2
}

# Runs a command, or with --dry-run prints it.
run() {
  if [ -n "$dry" ]; then
    local words
    printf -v words '%q ' "$@"
    echo "${words% }"
  else
    "$@"
  fi
}
