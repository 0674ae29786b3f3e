# shellcheck shell=bash
# Sourced by run_*.sh. A recipe names its settings, then calls `launch`.
#   setting NAME DEFAULT MEANING    environment variable with a default, listed by `--help`; the first one of a name counts
#   launch FOLDER OVERRIDE... -- "$@"    starts $INTERPRETER with these Hydra overrides, then the user's, and shows the run;
#                                       log, events and metrics are in FOLDER
# PARTIAL_ROLLOUT=0 leaves out the flag: the baselines are the same recipes started that way.
# PARTIAL_ROLLOUT_DRY_RUN=1 prints the command instead of running it.

RUN_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly RUN_DIR
NAMES=()
SETTINGS=()

setting() {
  local name=$1 default=$2 meaning=$3
  [[ " ${NAMES[*]-} " == *" $name "* ]] && return
  NAMES+=("$name")
  printf -v "$name" '%s' "${!name:-$default}"
  SETTINGS+=("$(printf '  %-24s %s (%s)' "$name" "$meaning" "$default")")
}

setting PARTIAL_ROLLOUT 1 "0 runs the baseline on the same settings: verl's sync trainer, or whole requests for images"
setting PARTIAL_ROLLOUT_DRY_RUN 0 "1 prints the command instead of running it"

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# The comment at the top of the started script, then its settings.
print_help() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
  printf '\nEnvironment variables (defaults in parentheses):\n'
  printf '%s\n' "${SETTINGS[@]}"
  printf '\nAll arguments are passed on as Hydra overrides, for example trainer.total_training_steps=5\n'
}

help_if_asked() {
  local argument
  for argument in "$@"; do
    [[ $argument == --help || $argument == -h ]] || continue
    print_help
    exit 0
  done
}

is_dry_run() { [[ $PARTIAL_ROLLOUT_DRY_RUN == 1 ]]; }

mode_name() { if [[ $PARTIAL_ROLLOUT == 1 ]]; then echo partial; else echo baseline; fi; }

# Fills COMMAND; the user's overrides come last and win.
build_command() {
  COMMAND=("$INTERPRETER" -m partial_rollout.main_ppo)
  if [[ $1 == --config-name ]]; then
    COMMAND+=("$1" "$2")
    shift 2
  fi
  [[ $PARTIAL_ROLLOUT == 1 ]] && COMMAND+=(+async_training.partial_rollout=True)
  local argument
  for argument in "$@"; do
    [[ $argument == -- ]] || COMMAND+=("$argument")
  done
}

# A path as a Hydra value: characters that mean something to Hydra, as in `a,b` or `x=1`, mean nothing in quotes.
path_value() { printf "'%s'" "${1//\'/\\\'}"; }

print_command() { printf '%q ' "${COMMAND[@]}" && printf '\n'; }

# verl's file logger empties its file at the start, so a resumed run gets a new one: metrics.jsonl, metrics-2.jsonl, ...
metrics_file() { # metrics_file DIRECTORY
  local path=$1/metrics.jsonl number=1
  while [[ -e $path ]]; do path=$1/metrics-$((++number)).jsonl; done
  echo "$path"
}

require_file() { # require_file PATH HINT
  is_dry_run || [[ -e $1 ]] || fail "$1 does not exist. $2"
}

launch() {
  local folder=$1
  shift
  build_command "$@"
  if is_dry_run; then
    print_command
    exit 0
  fi
  watch_command "$folder"
}

# Takes the place of this shell: the run's progress on the screen, what verl prints in FOLDER/run.log.
watch_command() { # watch_command FOLDER
  exec "$INTERPRETER" -m partial_rollout.watch "$1" -- "${COMMAND[@]}"
}
