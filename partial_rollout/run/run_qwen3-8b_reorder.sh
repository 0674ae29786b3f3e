#!/usr/bin/env bash
# GRPO on DAPO-Math-17k with Qwen3-8B and reordered rounds: a round trains what it begins, and sets the longest responses
# aside with their tokens, for a round of their own.
# Data: python3 -m partial_rollout.run.data.dapo_math --out ~/data/dapo_math
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
setting MODEL_PATH Qwen/Qwen3-8B "Hugging Face name or directory"
setting TRAIN_FILE "$HOME/data/dapo_math/train.parquet" "training prompts"
setting VAL_FILE "$HOME/data/dapo_math/test.parquet" "validation prompts"
setting EXPERIMENT qwen3-8b_reorder "name of the run"
setting MAX_PROMPT_LENGTH 2048 "tokens"
setting MAX_RESPONSE_LENGTH 8192 "tokens"
setting MAX_TOKENS_PER_GPU 16384 "tokens in one training micro-batch on a GPU"
setting GEN_BATCH_SIZE null "prompts of a round; null: 1.25 x BATCH_SIZE"
DATA_HINT="Make it: python3 -m partial_rollout.run.data.dapo_math --out DIR, then set TRAIN_FILE and VAL_FILE."
source "$RUN_DIR/lib/gpu_grpo.sh"

help_if_asked "$@"
gpu_grpo grpo partial_rollout.tail.policy=reorder partial_rollout.tail.gen_batch_size="$GEN_BATCH_SIZE" -- "$@"
