# shellcheck shell=bash
# Sourced by the other scripts: runs commands, or prints them with --dry-run, and reports wrong flags.
# shellcheck disable=SC2034 # the sourcing scripts set and read `dry`

WIDTH=120 # of a printed command's lines
dry=''

refuse() {
  echo "error: $1" >&2
  exit 2
}

# run COMMAND…: runs a command, or prints it with --dry-run.
run() {
  if [ -n "$dry" ]; then show "$@"; else "$@"; fi
}

# show COMMAND…: prints a command as it can be pasted into a shell, with long lines continued.
show() {
  local word line='' quoted
  for word in "$@"; do
    quote "$word"
    if [ -n "$line" ] && [ $((${#line} + ${#quoted})) -gt $((WIDTH - 3)) ]; then
      printf '%s \\\n' "$line"
      line="    $quoted"
    else
      line+=${line:+ }$quoted
    fi
  done
  printf '%s\n' "$line"
}

# join WORD…: sets `joined` to the words as a shell reads them.
join() {
  local word quoted
  joined=''
  for word in "$@"; do
    quote "$word"
    joined+=${joined:+ }$quoted
  done
}

# quote WORD: sets `quoted` to the word as a shell reads it, in quotes where it has to be.
quote() {
  local flag='' value=$1 mark="'"
  quoted=$1
  if [[ $1 =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then return; fi
  if [[ $1 == *[[:cntrl:]]* ]]; then printf -v quoted %q "$1" && return; fi
  if [[ $1 =~ ^--[A-Za-z0-9_.-]+= ]]; then
    flag=${BASH_REMATCH[0]}
    value=${1#"$flag"}
  fi
  if [[ $value == *"'"* && $value != *[\$\`\"\\!]* ]]; then
    quoted=$flag\"$value\"
  else
    quoted=$flag\'${value//"$mark"/"$mark\\$mark$mark"}\'
  fi
}
