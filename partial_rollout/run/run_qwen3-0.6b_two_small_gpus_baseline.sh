#!/usr/bin/env bash
# The same job as run_qwen3-0.6b_two_small_gpus.sh, without partial rollout (verl's sync trainer); see its --help.
set -euo pipefail
PARTIAL_ROLLOUT=0 exec bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen3-0.6b_two_small_gpus.sh" "$@"
