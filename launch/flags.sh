# shellcheck shell=bash
# Sourced by the scripts that start a single run: defaults for flags of gspo_jax.train that may be left out.
# shellcheck disable=SC2034 # the sourcing scripts read these variables

# complete_flags FLAGS…: sets `workdir` to the run folder (the last flag wins, as in absl), and `defaults` to the flags that are
# missing; the config is then $default_config, or configs/tiny.py.
complete_flags() {
  local config=''
  workdir=''
  defaults=()
  while [ $# -gt 0 ]; do
    case $1 in
      --config=* | -config=*) config=${1#*=} ;;
      --workdir=* | -workdir=*) workdir=${1#*=} ;;
      --config | -config) if [ $# -gt 1 ]; then config=$2 && shift; fi ;;
      --workdir | -workdir) if [ $# -gt 1 ]; then workdir=$2 && shift; fi ;;
      --) break ;;
    esac
    shift
  done
  if [ -z "$config" ]; then
    config=${default_config:-configs/tiny.py}
    defaults+=(--config="$config")
  fi
  if [ -z "$workdir" ]; then
    workdir=${config##*/}
    workdir=runs/${workdir%%.py*}
    defaults+=(--workdir="$workdir")
  fi
}
