#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-4B.
# Data: python3 -m partial_rollout.run.data.gsm8k --out ~/data/gsm8k (files of verl's own script work as well).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
setting MODEL_PATH Qwen/Qwen3-4B "Hugging Face name or directory"
setting TRAIN_FILE "$HOME/data/gsm8k/train.parquet" "training prompts"
setting VAL_FILE "$HOME/data/gsm8k/test.parquet" "validation prompts"
setting EXPERIMENT qwen3-4b_gsm8k_grpo "name of the run"
setting MAX_TOKENS_PER_GPU 16384 "tokens in one training micro-batch on a GPU"
DATA_HINT="Make it: python3 -m partial_rollout.run.data.gsm8k --out DIR, then set TRAIN_FILE and VAL_FILE."
source "$RUN_DIR/lib/gpu_grpo.sh"

help_if_asked "$@"
gpu_grpo grpo -- "$@"
