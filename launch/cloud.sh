# shellcheck shell=bash
# Sourced by the scripts that run on Google Cloud: their flags, checked before anything is done, and the tree that is sent.
# Flags are written --name=value. --config… and --workdir= go to the trainer.
# shellcheck disable=SC2034 # they read these variables

# shellcheck source=launch/command.sh
source launch/command.sh

name=''
project=''
zone=''
type=''
slices=1
spot=''
workdir=''
train=() # flags of gspo_jax.train

# read_flag FLAG: a flag that these scripts share; fails where it is none of them.
read_flag() {
  case $1 in
    --name=?*) name=${1#*=} ;;
    --project=?*) project=${1#*=} ;;
    --zone=?*) zone=${1#*=} ;;
    --type=?*) type=${1#*=} ;;
    --slices=?*) slices=${1#*=} ;;
    --spot) spot=yes ;;
    --dry-run) dry=yes ;;
    --workdir=?*) workdir=${1#*=} && train+=("$1") ;;
    --config=?* | --config.*=*) train+=("$1") ;;
    *) return 1 ;;
  esac
}

# show_help SCRIPT: its first comment.
show_help() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//;t show;d;:show;p;}' "$1"
}

# matches FLAG VALUE PATTERN HINT: refuses a value that is missing or has another form.
matches() {
  if [ -z "$2" ]; then refuse "$1= is missing; $4"; fi
  if ! [[ $2 =~ ^$3$ ]]; then refuse "$1=$2 cannot be right; $4"; fi
}

check_name() {
  matches --name "$name" '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' "use lower-case letters, digits and dashes, 40 at most, such as --name=gspo"
}

check_place() {
  matches --project "$project" '([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]' "give the ID of a Google Cloud project, such as --project=my-project"
  matches --zone "$zone" '[a-z]+-[a-z]+[0-9]+-[a-z]' "give the zone of your quota, such as --zone=us-east5-a"
}

check_type() {
  matches --type "$type" '(v[234]|v5p|v5litepod|v6e)-[1-9][0-9]*' "give an accelerator type, such as --type=v5p-128 or --type=v6e-8"
  matches --slices "$slices" '[1-9][0-9]{0,3}' "give a number of slices, such as --slices=2"
}

# What goes to the trainer. A machine that is preempted loses its disk, so the run folder is in a bucket.
check_train() {
  local given=" ${train[*]-}"
  case $given in *' --config='*) ;; *) refuse "--config= is missing; give a config of the repository, such as --config=configs/tiny.py" ;; esac
  matches --workdir "$workdir" 'gs://[a-z0-9][-a-z0-9_.]*/.*[^/]' "give a folder in a bucket, such as --workdir=gs://my-bucket/runs/first"
}

# needs TOOL WHERE: refuses where a program is not installed.
needs() {
  if [ -z "$dry" ] && ! command -v "$1" >/dev/null; then refuse "$1 is not installed; see $2"; fi
}

# archive FILE FORMAT: what is committed, so that it is known what runs.
archive() {
  if [ -z "$dry" ] && [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    echo "note: what is not committed stays here" >&2
  fi
  run mkdir -p "$(dirname "$1")" &&
    run git archive --format="$2" --output="$1" HEAD
}
