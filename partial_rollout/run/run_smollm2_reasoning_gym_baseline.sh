#!/usr/bin/env bash
# The same job as run_smollm2_reasoning_gym.sh, without partial rollout (verl's sync trainer); see its --help.
set -euo pipefail
PARTIAL_ROLLOUT=0 exec bash "$(dirname "${BASH_SOURCE[0]}")/run_smollm2_reasoning_gym.sh" "$@"
