#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-0.6B on two GPUs of 24 GB in one machine: small batches, and optimizer and weights of the
# trainer in host memory while the engines generate.
# Data: python3 -m partial_rollout.run.data.gsm8k --out ~/data/gsm8k
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
setting MODEL_PATH Qwen/Qwen3-0.6B "Hugging Face name or directory"
setting TRAIN_FILE "$HOME/data/gsm8k/train.parquet" "training prompts"
setting VAL_FILE "$HOME/data/gsm8k/test.parquet" "validation prompts"
setting EXPERIMENT qwen3-0.6b_two_small_gpus "name of the run"
setting GPUS_PER_NODE 2 "GPUs on each machine"
setting BATCH_SIZE 8 "prompts in a training step"
setting MINI_BATCH_SIZE 8 "prompts in an optimizer step"
setting MAX_PROMPT_LENGTH 512 "tokens"
setting MAX_RESPONSE_LENGTH 2048 "tokens"
setting MAX_TOKENS_PER_GPU 8192 "tokens in one training micro-batch on a GPU"
setting GPU_MEMORY_UTILIZATION 0.5 "share of GPU memory for the rollout engine"
DATA_HINT="Make it: python3 -m partial_rollout.run.data.gsm8k --out DIR, then set TRAIN_FILE and VAL_FILE."
source "$RUN_DIR/lib/gpu_grpo.sh"

help_if_asked "$@"
# Ray reserves a CPU for each storage unit, and such machines have few.
gpu_grpo grpo actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.rollout.agent.num_workers=2 \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 -- "$@"
