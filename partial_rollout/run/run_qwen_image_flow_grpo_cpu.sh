#!/usr/bin/env bash
# FlowGRPO of a tiny Qwen-Image on a CPU: sets up an environment, makes a random checkpoint of 2.3 MB, and trains it
# with step-wise rollouts that are interrupted by every weight update. Its images turn red; before.png and after.png show it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
ROOT=$(cd "$RUN_DIR/../.." && pwd)
EXPERIMENT=qwen-image-tiny
setting VENV "$ROOT/.venv-cpu" "environment, set up by scripts/setup_cpu.sh; vllm-omni goes to VENV/omni"
setting SKIP_SETUP 0 "1 uses VENV as it is"
setting PARTIAL_ROLLOUT_HOME "$ROOT/outputs" "the checkpoint and the runs go to PARTIAL_ROLLOUT_HOME/qwen-image-tiny"
setting MODEL_PATH "$PARTIAL_ROLLOUT_HOME/$EXPERIMENT/model" "checkpoint, made where it is missing"
setting OUTPUT_DIR "$PARTIAL_ROLLOUT_HOME/$EXPERIMENT/$(mode_name)-$(date +%Y%m%d-%H%M%S)" "metrics, pictures, checkpoints; the same folder again goes on"
INTERPRETER=$VENV/omni/bin/python
source "$RUN_DIR/lib/image.sh"
help_if_asked "$@"

export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
source "$RUN_DIR/lib/cpu_environment.sh"
image_command model.path="$(path_value "$MODEL_PATH")" model.dtype=float32 \
  rollout.gpus_per_server=0 rollout.height=64 rollout.width=64 rollout.n=8 rollout.max_num_seqs=8 \
  actor.device=cpu actor.gradient_checkpointing=false actor.lr=1.0e-3 actor.micro_batch_size=16 \
  trainer.train_batch_size=4 trainer.total_training_steps=60 "$@"

[[ $SKIP_SETUP == 1 ]] || PARTIAL_ROLLOUT_OMNI=1 bash "$ROOT/scripts/setup_cpu.sh" "$VENV"
require_file "$INTERPRETER" "Leave out SKIP_SETUP=1, or set VENV to an environment that has vllm-omni in VENV/omni."
"$INTERPRETER" -m partial_rollout.run.tiny_qwen_image.make_checkpoint --out "$MODEL_PATH"
watch_command "$OUTPUT_DIR"
