# shellcheck shell=bash
# Sourced by the other scripts: runs commands, or prints them with --dry-run, and reports wrong flags.
# shellcheck disable=SC2034 # the sourcing scripts set and read `dry`

dry=''

refuse() {
  echo "error: $1" >&2
  exit 2
}

# run COMMAND…: runs a command, or prints it with --dry-run.
run() {
  if [ -n "$dry" ]; then
    local words
    printf -v words '%q ' "$@"
    echo "${words% }"
  else
    "$@"
  fi
}
