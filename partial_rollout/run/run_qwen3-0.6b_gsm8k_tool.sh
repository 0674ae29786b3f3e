#!/usr/bin/env bash
# Multi-turn GRPO on GSM8K with Qwen3-0.6B, which may check an answer with a tool before it settles.
# Data: python3 -m partial_rollout.run.data.gsm8k --tool --out ~/data/gsm8k_tool
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
setting MODEL_PATH Qwen/Qwen3-0.6B "Hugging Face name or directory"
setting TRAIN_FILE "$HOME/data/gsm8k_tool/train.parquet" "training prompts"
setting VAL_FILE "$HOME/data/gsm8k_tool/test.parquet" "validation prompts"
setting EXPERIMENT qwen3-0.6b_gsm8k_tool "name of the run"
setting TOOL_CONFIG "$RUN_DIR/tools/gsm8k_tool_config.yaml" "tools the model may call"
setting MAX_TURNS 5 "answers of the model in one trajectory"
DATA_HINT="Make it: python3 -m partial_rollout.run.data.gsm8k --tool --out DIR, then set TRAIN_FILE and VAL_FILE."
source "$RUN_DIR/lib/gpu_grpo.sh"

help_if_asked "$@"
gpu_grpo grpo \
  actor_rollout_ref.rollout.multi_turn.enable=True \
  actor_rollout_ref.rollout.multi_turn.tool_config_path="$TOOL_CONFIG" \
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns="$MAX_TURNS" -- "$@"
