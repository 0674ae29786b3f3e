# shellcheck shell=bash
# Sourced by the CPU scripts: variables that verl, vLLM, torch and Ray read when they are imported.
export VERL_PLATFORM=cpu
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB
export VLLM_CPU_OMP_THREADS_BIND=nobind                    # the engine shares the cores with training
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}               # torch spins at barriers: more threads than cores stall it
export TORCHDYNAMO_DISABLE=1                               # vLLM compiles two small functions: 10 s of the first step
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1              # nothing here comes from the hub
export TOKENIZERS_PARALLELISM=false
export RAY_USAGE_STATS_ENABLED=0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
