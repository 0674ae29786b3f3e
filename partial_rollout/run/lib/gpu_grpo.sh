# shellcheck shell=bash
# Sourced by the GPU recipes, after the defaults that differ between them are set with `setting`.
#   gpu_grpo NAME OVERRIDE... -- "$@"    NAME is one of configs/recipe/*.yaml

setting PYTHON python3 "interpreter of an environment with this package, verl and vLLM"
INTERPRETER=$PYTHON
setting NUM_NODES 1 "machines"
setting GPUS_PER_NODE 8 "GPUs on each machine"
setting ROLLOUT_GPUS 0 "GPUs of engines alone, of GPUS_PER_NODE on each machine; 0: engines and training share all"
setting TENSOR_PARALLEL 1 "GPUs of one rollout engine"
setting BATCH_SIZE 256 "prompts in a training step"
setting MINI_BATCH_SIZE 64 "prompts in an optimizer step"
setting GROUP_SIZE 8 "responses to each prompt"
setting MAX_PROMPT_LENGTH 1024 "tokens"
setting MAX_RESPONSE_LENGTH 4096 "tokens"
setting MAX_TOKENS_PER_GPU 24576 "tokens in one training micro-batch on a GPU"
setting GPU_MEMORY_UTILIZATION 0.6 "share of GPU memory for the rollout engine"
setting LEARNING_RATE 1.0e-6 "of AdamW"
setting TOTAL_STEPS 200 "training steps"
setting SAVE_FREQ 50 "steps between checkpoints"
setting TEST_FREQ 10 "steps between validations"
setting OUTPUT_DIR "$PWD/outputs" "checkpoints and metrics go to OUTPUT_DIR/EXPERIMENT_MODE"
setting LOGGER "[console,file]" "verl loggers, for example [console,wandb]"

gpu_grpo() {
  local recipe=$1 experiment output placement=()
  shift
  if ((ROLLOUT_GPUS > 0)); then
    [[ $PARTIAL_ROLLOUT == 1 ]] || fail "ROLLOUT_GPUS=$ROLLOUT_GPUS needs PARTIAL_ROLLOUT=1: give a baseline as many GPUs by GPUS_PER_NODE"
    ((ROLLOUT_GPUS < GPUS_PER_NODE)) || fail "ROLLOUT_GPUS=$ROLLOUT_GPUS must be below GPUS_PER_NODE=$GPUS_PER_NODE: training needs the others"
    placement=(partial_rollout.placement=separate actor_rollout_ref.rollout.nnodes="$NUM_NODES"
      actor_rollout_ref.rollout.n_gpus_per_node="$ROLLOUT_GPUS")
  fi
  experiment=${EXPERIMENT}_$(mode_name)
  output=$OUTPUT_DIR/$experiment
  require_file "$TRAIN_FILE" "$DATA_HINT"
  require_file "$VAL_FILE" "$DATA_HINT"
  is_dry_run || mkdir -p "$output"
  export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$(metrics_file "$output")}
  launch "$output" +recipe="$recipe" \
    data.train_files="$(path_value "$TRAIN_FILE")" data.val_files="$(path_value "$VAL_FILE")" data.train_batch_size="$BATCH_SIZE" \
    data.max_prompt_length="$MAX_PROMPT_LENGTH" data.max_response_length="$MAX_RESPONSE_LENGTH" \
    actor_rollout_ref.model.path="$(path_value "$MODEL_PATH")" \
    actor_rollout_ref.actor.optim.lr="$LEARNING_RATE" \
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS_PER_GPU" \
    actor_rollout_ref.rollout.n="$GROUP_SIZE" \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$TENSOR_PARALLEL" \
    actor_rollout_ref.rollout.gpu_memory_utilization="$GPU_MEMORY_UTILIZATION" \
    trainer.nnodes="$NUM_NODES" trainer.n_gpus_per_node="$((GPUS_PER_NODE - ROLLOUT_GPUS))" \
    trainer.total_training_steps="$TOTAL_STEPS" trainer.total_epochs=1000 \
    trainer.save_freq="$SAVE_FREQ" trainer.test_freq="$TEST_FREQ" \
    trainer.project_name=partial_rollout trainer.experiment_name="$experiment" \
    trainer.default_local_dir="$(path_value "$output")" hydra.run.dir="$(path_value "$output/hydra")" trainer.logger="$LOGGER" \
    ${placement[@]+"${placement[@]}"} "$@"
}
