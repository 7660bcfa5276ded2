# shellcheck shell=bash
# Sourced by the scripts for Google Cloud: parses and checks their flags before anything runs, and archives the source tree.
# Flags are written --name=value. --config… and --workdir= are passed on to the trainer.
# shellcheck disable=SC2034 # the sourcing scripts read these variables

# shellcheck source=launch/command.sh
source launch/command.sh

name=''
project=''
zone=''
type=''
slices=1
spot=''
workdir=''
train=() # flags for gspo_jax.train
fetch=() # folders in buckets that every machine copies before the run

# read_flag FLAG: reads a flag that these scripts share; fails if it is not one of them.
read_flag() {
  case $1 in
    --name=?*) name=${1#*=} ;;
    --project=?*) project=${1#*=} ;;
    --zone=?*) zone=${1#*=} ;;
    --type=?*) type=${1#*=} ;;
    --slices=?*) slices=${1#*=} ;;
    --spot) spot=yes ;;
    --fetch=gs://?*/?*) fetch+=("${1#*=}") ;;
    --dry-run) dry=yes ;;
    --workdir=?*) workdir=${1#*=} && train+=("$1") ;;
    --config=?* | --config.*=*) train+=("$1") ;;
    *) return 1 ;;
  esac
}

# show_help SCRIPT: prints the script's first comment.
show_help() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//;t show;d;:show;p;}' "$1"
}

# require_form FLAG VALUE PATTERN HINT: exits with an error if the value is missing or does not match the pattern.
require_form() {
  if [ -z "$2" ]; then refuse "$1= is missing; $4"; fi
  if ! [[ $2 =~ ^$3$ ]]; then refuse "$1=$2 is not valid; $4"; fi
}

check_name() {
  require_form --name "$name" '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' "use lower-case letters, digits and dashes, 40 at most, such as --name=gspo"
}

check_place() {
  require_form --project "$project" '([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]' "give the ID of a Google Cloud project, such as --project=my-project"
  require_form --zone "$zone" '[a-z]+-[a-z]+[0-9]+-[a-z]' "give the zone of your quota, such as --zone=us-east5-a"
}

# check_config: with --dry-run, checks the trainer's flags and config as far as this machine can, if the project is installed here.
check_config() {
  if [ -z "$dry" ]; then return; fi
  if is_here; then
    check_for "$slices" || exit
  else
    echo "note: the config is not checked, as .venv is missing here; bash launch/local.sh makes it" >&2
  fi
}

# Succeeds if the project is installed on this machine.
is_here() {
  .venv/bin/python -c 'import gspo_jax' 2>/dev/null
}

# check_for SLICES: checks the trainer's flags and config for so many slices, or for any machine without --type.
check_for() {
  local where=${type:-0}
  if [ "$1" -gt 1 ]; then where=${1}x$where; fi
  JAX_PLATFORMS=cpu .venv/bin/python -m gspo_jax.train "${train[@]}" --check_for="$where" >&2
}

# Of a slice as `plan --topology` names it, prints the accelerator type, which counts TensorCores on v4, v5p and tpu7x, else chips.
accelerator_type() {
  local kind=${1%%:*} sides=${1#*:} chips=1 side
  for side in ${sides//x/ }; do chips=$((chips * side)); done
  case $kind in
    v4 | v5p | tpu7x) echo "$kind-$((2 * chips)), whose $chips chips have two TensorCores each" ;;
    v5e) echo "v5litepod-$chips" ;;
    *) echo "$kind-$chips" ;;
  esac
}

# Refuses tpu7x: its machines are Compute Engine's, which the Cloud TPU API does not provide.
without_tpu7x() {
  case $type in tpu7x-*) refuse "--type=$type cannot be requested by $1; make a GKE cluster with xpk cluster create --tpu-type=$type and use launch/gke.sh" ;; esac
}

# check_type: checks --type, and gives it the name that Cloud TPU's API, xpk and SkyPilot know: v5litepod-8 for v5e-8, and for GKE's
# machine ct5lp-hightpu-8t.
check_type() {
  if [[ $type =~ ^(v5e|ct5lp-hightpu|ct6e-standard|ct5p-hightpu|ct4p-hightpu|tpu7x-standard)-([1-9][0-9]*)t?$ ]]; then
    case ${BASH_REMATCH[1]} in
      v5e | ct5lp-*) type=v5litepod-${BASH_REMATCH[2]} ;;
      ct6e-*) type=v6e-${BASH_REMATCH[2]} ;;
      ct5p-*) type=v5p-$((2 * BASH_REMATCH[2])) ;; # chips, whose TensorCores count
      ct4p-*) type=v4-$((2 * BASH_REMATCH[2])) ;;
      tpu7x-*) type=tpu7x-$((2 * BASH_REMATCH[2])) ;;
    esac
  fi
  if [[ $type =~ ^(v4|v5e|v5p|v6e|tpu7x):[1-9][0-9]{0,2}(x[1-9][0-9]{0,2}){1,2}$ ]]; then
    refuse "--type=$type is a topology; give its accelerator type, --type=$(accelerator_type "$type")"
  fi
  require_form --type "$type" '((v4|v5p|tpu7x)-([1-9][0-9]*)?[02468]|(v5litepod|v6e)-[1-9][0-9]*)' "give an accelerator type, such as --type=v5e-8, or --type=v5p-128, whose 64 chips have two TensorCores each"
  require_form --slices "$slices" '[1-9][0-9]{0,3}' "give a number of slices, such as --slices=2"
}

# Checks the trainer's flags. The run folder must be in a bucket, since a preempted machine loses its disk.
check_train() {
  local given=" ${train[*]-}"
  case $given in *' --config='*) ;; *) refuse "--config= is missing; give a config in the repository, such as --config=configs/tiny.py" ;; esac
  require_form --workdir "$workdir" 'gs://[a-z0-9][-a-z0-9_.]*/.*[^/]' "give a folder in a bucket, such as --workdir=gs://my-bucket/runs/first"
}

# require_tool TOOL URL: exits with an error if a program is not installed.
require_tool() {
  if [ -z "$dry" ] && ! command -v "$1" >/dev/null; then refuse "$1 is not installed; see $2"; fi
}

# require_tree: exits with an error if there is no commit to send.
require_tree() {
  require_tool git https://git-scm.com
  if [ -z "$dry" ] && ! git rev-parse --quiet --verify HEAD >/dev/null 2>&1; then
    refuse "$PWD has no commit to send; make one with git init && git add --all && git commit --message=start"
  fi
}

# archive FILE FORMAT: archives the committed tree, so that the run can be traced to a commit.
archive() {
  if [ -z "$dry" ] && [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    echo "note: uncommitted changes are not sent" >&2
  fi
  run mkdir -p "$(dirname "$1")" &&
    run git archive --format="$2" --output="$1" HEAD
}
