#!/usr/bin/env bash
# Compiles an environment's packages to bytecode on all cores; what is compiled and unchanged is skipped.
#   scripts/compile_bytecode.sh VENV
set -euo pipefail
venv=${1:?usage: scripts/compile_bytecode.sh VENV}
done_for=$venv/.bytecode # the stamps of scripts/setup_cpu.sh that it was made for

stamps=$(cat "$venv"/.stamp-*)
[[ -f $done_for && $(<"$done_for") == "$stamps" ]] && exit 0
# As with pip, files that are no valid Python (templates, test data) stay as they are: hence no look at the exit code.
"$venv/bin/python" -m compileall -q -j 0 "$venv"/lib "$venv"/omni/lib >/dev/null 2>&1 || true
printf '%s\n' "$stamps" >"$done_for"
