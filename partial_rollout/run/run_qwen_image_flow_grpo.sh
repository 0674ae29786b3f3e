#!/usr/bin/env bash
# FlowGRPO of Qwen-Image with LoRA: one GPU trains, the others generate. Needs an environment with this package, vllm and
# vllm-omni (requirements/omni-gpu.txt) and GPUs with 80 GB.
# For MixGRPO: ALGORITHM=mix_grpo. The default reward says how red an image is: set REWARD and PROMPTS to your own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
EXPERIMENT=qwen-image
setting PYTHON python3 "interpreter of an environment with this package, verl, vllm and vllm-omni"
INTERPRETER=$PYTHON
setting MODEL_PATH Qwen/Qwen-Image "Hugging Face name or directory"
setting NUM_SERVERS 7 "rollout servers"
setting GPUS_PER_SERVER 1 "GPUs of one server"
setting BATCH_SIZE 16 "prompts in a training step"
setting GROUP_SIZE 16 "images to each prompt"
setting MAX_NUM_SEQS 8 "images that one server denoises together"
setting SIZE 512 "height and width of the images"
setting NUM_STEPS 10 "denoise steps of a training image"
setting LORA_RANK 64 "of the adapter; 0 trains all weights"
setting LEARNING_RATE 3.0e-4 "of AdamW"
setting TOTAL_STEPS 300 "training steps"
source "$RUN_DIR/lib/image.sh"
help_if_asked "$@"

image_command model.path="$(path_value "$MODEL_PATH")" model.lora_rank="$LORA_RANK" model.lora_alpha="$((LORA_RANK > 0 ? 2 * LORA_RANK : 1))" \
  data.negative_prompt="' '" rollout.true_cfg_scale=4.0 \
  rollout.num_servers="$NUM_SERVERS" rollout.gpus_per_server="$GPUS_PER_SERVER" rollout.max_num_seqs="$MAX_NUM_SEQS" \
  rollout.height="$SIZE" rollout.width="$SIZE" rollout.n="$GROUP_SIZE" rollout.num_steps="$NUM_STEPS" \
  actor.lr="$LEARNING_RATE" trainer.train_batch_size="$BATCH_SIZE" trainer.total_training_steps="$TOTAL_STEPS" \
  trainer.weights_timeout_s=600 "$@"
watch_command "$OUTPUT_DIR"
