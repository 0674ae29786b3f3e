#!/usr/bin/env bash
# The quickstart: sets up a CPU environment, makes a small task and a tiny starting checkpoint, and trains 60 steps of
# GRPO on real verl, vLLM and Ray. Then it trains 20 steps without the flag, with the same seed, and says what the flag
# changed. Needs 2 cores, 12 GiB of memory, Python 3.11 or 3.12, and no GPU.
# A second start reuses the environment and the task and trains anew; RUN=<earlier run> continues that one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
ROOT=$(cd "$RUN_DIR/../.." && pwd)
setting VENV "$ROOT/.venv-cpu" "environment, set up by scripts/setup_cpu.sh"
setting SKIP_SETUP 0 "1 uses VENV as it is"
setting PARTIAL_ROLLOUT_HOME "$ROOT/outputs" "the task and the runs go to PARTIAL_ROLLOUT_HOME/quickstart"
setting NUM_TRAIN 4096 "training prompts"
setting WARM_START_STEPS 500 "supervised steps of the starting checkpoint; that of 500 lies beside make_task.py, others are trained"
setting BASELINE_STEPS 20 "most steps without the flag after the run, to compare with it; 0 leaves them out"
setting RUN "$PARTIAL_ROLLOUT_HOME/quickstart/$(mode_name)-$(date +%Y%m%d-%H%M%S)" "log, metrics and checkpoints"
help_if_asked "$@"

INTERPRETER=$VENV/bin/python
task=$PARTIAL_ROLLOUT_HOME/quickstart/task
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
source "$RUN_DIR/lib/cpu_environment.sh"

build_command --config-name quickstart_cpu \
  data.train_files="$(path_value "$task/train.parquet")" data.val_files="$(path_value "$task/val.parquet")" \
  actor_rollout_ref.model.path="$(path_value "$task/model")" \
  trainer.default_local_dir="$(path_value "$RUN/checkpoints")" partial_rollout.events="$(path_value "$RUN/events")" \
  hydra.run.dir="$(path_value "$RUN/hydra")" "$@"
if is_dry_run; then
  print_command
  exit 0
fi

[[ $SKIP_SETUP == 1 ]] || PARTIAL_ROLLOUT_BYTECODE=0 bash "$ROOT/scripts/setup_cpu.sh" "$VENV"
require_file "$INTERPRETER" "Leave out SKIP_SETUP=1, or set VENV to an environment that exists."
compiling=
if [[ $SKIP_SETUP != 1 ]]; then # while the task is made
  bash "$ROOT/scripts/compile_bytecode.sh" "$VENV" &
  compiling=$!
fi
"$INTERPRETER" -m partial_rollout.run.quickstart.make_task --out "$task" \
  --num-train "$NUM_TRAIN" --warm-start-steps "$WARM_START_STEPS"
[[ -z $compiling ]] || wait "$compiling" || printf 'compiling to bytecode failed; the start takes longer\n' >&2

mkdir -p "$RUN"
VERL_FILE_LOGGER_PATH=$(metrics_file "$RUN")
export VERL_FILE_LOGGER_PATH
if [[ $PARTIAL_ROLLOUT == 1 && $BASELINE_STEPS != 0 ]]; then
  exec "$INTERPRETER" -m partial_rollout.run.quickstart.verdict "$RUN" --baseline-steps "$BASELINE_STEPS" -- "${COMMAND[@]}"
fi
watch_command "$RUN"
