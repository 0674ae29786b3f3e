# shellcheck shell=bash
# Sourced by the recipes for image models.
#   image_command OVERRIDE... -- "$@"   fills COMMAND with $INTERPRETER, these Hydra overrides, then the user's

setting ALGORITHM flow_grpo "flow_grpo or mix_grpo"
setting OUTPUT_DIR "$PWD/outputs/$EXPERIMENT" "metrics, pictures, checkpoints; the same folder again goes on"
setting PROMPTS "$RUN_DIR/tiny_qwen_image/prompts.txt" "text file with one prompt a line"
setting REWARD partial_rollout.run.tiny_qwen_image.reward.redness "import path of a function: images, prompts -> numbers"

image_command() {
  COMMAND=("$INTERPRETER" -m partial_rollout.main_diffusion
    algorithm.name="$ALGORITHM" data.prompts="$(path_value "$PROMPTS")" trainer.reward="$REWARD"
    trainer.output_dir="$(path_value "$OUTPUT_DIR")")
  [[ $PARTIAL_ROLLOUT == 1 ]] || COMMAND+=(rollout.step_execution=false rollout.prefetch_factor=1)
  local argument
  for argument in "$@"; do
    [[ $argument == -- ]] || COMMAND+=("$argument")
  done
  if is_dry_run; then
    print_command
    exit 0
  fi
}
