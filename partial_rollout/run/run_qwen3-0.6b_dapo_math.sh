#!/usr/bin/env bash
# DAPO (clipping, token-mean loss, dynamic sampling) on DAPO-Math-17k with Qwen3-0.6B, validated on AIME 2024.
# Data: python3 -m partial_rollout.run.data.dapo_math --out ~/data/dapo_math
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
setting MODEL_PATH Qwen/Qwen3-0.6B "Hugging Face name or directory"
setting TRAIN_FILE "$HOME/data/dapo_math/train.parquet" "training prompts"
setting VAL_FILE "$HOME/data/dapo_math/test.parquet" "validation prompts"
setting EXPERIMENT qwen3-0.6b_dapo_math "name of the run"
setting MAX_PROMPT_LENGTH 2048 "tokens"
setting MAX_RESPONSE_LENGTH 8192 "tokens"
DATA_HINT="Make it: python3 -m partial_rollout.run.data.dapo_math --out DIR, then set TRAIN_FILE and VAL_FILE."
source "$RUN_DIR/lib/gpu_grpo.sh"

help_if_asked "$@"
gpu_grpo dapo -- "$@"
