#!/usr/bin/env bash
# Compiles an environment's packages to bytecode on all cores; what is compiled and unchanged is skipped. Files that
# hardly any run imports are left out: Python compiles them when one does.
#   scripts/compile_bytecode.sh VENV
set -euo pipefail
venv=$(cd "${1:?usage: scripts/compile_bytecode.sh VENV}" && pwd)
done_for=$venv/.bytecode # the stamps of scripts/setup_cpu.sh that it was made for
readonly SELDOM='/(tests?|testing|pip|anthropic)/|/(transformers|vllm/model_executor)/models/|/ray/(rllib|tune|serve)/'

stamps=$(cat "$venv"/.stamp-*)
[[ -f $done_for && $(<"$done_for") == "$stamps" ]] && exit 0
# As with pip, files that are no valid Python (templates, test data) stay as they are: hence no look at the exit code.
cd "$venv" # so that SELDOM is not found in the path of the environment itself
bin/python -m compileall -q -j 0 -x "$SELDOM" -p "$venv" lib omni/lib >/dev/null 2>&1 || true
printf '%s\n' "$stamps" >"$done_for"
