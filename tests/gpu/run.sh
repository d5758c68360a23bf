#!/usr/bin/env bash
# Runs all that needs a GPU, in a folder that pack.sh made: no network, nothing is downloaded, and
# no setting of the GPU is touched. Takes less than six minutes; the last lines are a short table.
#   bash run.sh             with python3
#   PYTHON=... bash run.sh  with another one
# Status: 0 all is well, 1 something failed, 3 there is no GPU that can be used.
# What was said goes to the folder $OUT too, where that is set.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site
export here python work site
logs=${OUT:-$work/logs}
mkdir -p "$logs"

export PYTHONPATH=$site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PIP_NO_INDEX=1 PIP_FIND_LINKS=$here/wheels PIP_CONFIG_FILE=/dev/null
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # of plugins that happen to be there
export KVMEM_RAW_COPIES=$here/bin/raw_copies.so KVMEM_GPU_KERNELS=$here/src/tests/gpu/kernels.ptx
# Before the driver is loaded: see tests/gpu/spin.hpp.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER
unset KVMEM_CUDART_PATH KVMEM_TEST_GPU

# ---- the steps, each in a shell of its own

# Into a folder of its own and not an environment, so that what is there (torch, say) is seen.
install() {
  local missing=() module wheel
  for module in numpy pytest pytest_benchmark rich typer; do
    "$python" -c "import $module" 2>/dev/null || missing+=("${module//_/-}")
  done
  if ((${#missing[@]})); then
    "$python" -m pip install -q --target "$site" "${missing[@]}" || return
  fi
  if ! "$python" -m pip install -q --target "$site" --no-deps --only-binary=:all: kvmem; then
    echo "no wheel fits this Python: building one"
    "$python" -m pip install -q --target "$site" --no-deps "$here/src" || return
  fi
  for wheel in "$here"/wheels/nvidia_cuda_runtime*.whl; do
    "$python" -m zipfile -e "$wheel" "$work/runtimes" || return
  done
  "$python" -c 'import kvmem; print("kvmem", kvmem.__version__, "in", kvmem.__file__)'
}

doctor() { COLUMNS=200 "$python" -c 'from kvmem.cli import main; main()' doctor; }

# Of the device with that runtime: what it is; or status 3, and why it cannot be used.
gpu() {
  KVMEM_CUDART_PATH=$1 "$python" - <<'PYTHON'
import kvmem

try:
    info = kvmem.open_device("cuda").info
except kvmem.DeviceUnavailable as error:
    print(error)
    raise SystemExit(3) from None
print(f"{info['name']} at {info['pci_bus_id']}, CUDA {info['runtime_version']}")
PYTHON
}

# It must have run something: without a GPU the suite has no such kinds.
contract() {
  KVMEM_CUDART_PATH=$1 "$here/bin/kvmem-test-contract" --gtest_brief=1 --gtest_filter="$2" |
    tee "$work/contract" && grep -Eq '[1-9][0-9]* tests? ' "$work/contract"
}

tests() {
  cd "$here/src" && "$python" -m pytest -p no:cacheprovider --color=no "$@"
}
export -f install doctor gpu contract tests

# ---- running them

table=()
failed=0
most_seconds=345

# step NAME SECONDS PATTERN COMMAND...: the last line that matches tells how it went.
step() {
  local name=$1 limit=$2 pattern=$3 log=$logs/$1.log start=$SECONDS status=0 said word=ok
  shift 3
  local left=$((most_seconds - SECONDS))
  ((limit <= left)) || limit=$((left > 1 ? left : 1))
  echo "--- $name"
  # Interrupted, pytest still says what it has.
  timeout --signal=INT --kill-after=10 "$limit" bash -o pipefail -c '"$@"' step "$@" \
    >"$log" 2>&1 || status=$?
  cat "$log"
  said=$(grep -E -- "$pattern" "$log" | tail -n 1)
  if ((status)); then
    failed=1 word=FAILED
  fi
  if ((status == 124 || status == 137)); then
    said="not done after $limit s; $said"
  fi
  table+=("$(printf '%-12s %-6s %4d s  %s' "$name" "$word" $((SECONDS - start)) "$said")")
  return "$status"
}

finish() {
  {
    echo
    printf '%s\n' "kvmem on ${device:-a machine without a GPU}" "${table[@]}" "$1"
  } | tee "$logs/summary.txt"
  exit "$2"
}

step install 150 '^kvmem ' install || finish "the package could not be installed" 1

# All runtimes that this driver takes, the newest first.
usable=()
device='' why=''
for library in "$work"/runtimes/nvidia/{cu13,cuda_runtime}/lib/libcudart.so.1[23]; do
  status=0
  said=$(timeout 30 bash -c 'gpu "$1"' step "$library" 2>&1) || status=$?
  case $status in
    0) usable+=("$library") device=${device:-$said} ;;
    3) why=${why:-$said} ;;
    *) finish "opening the device failed with status $status: $said" 1 ;;
  esac
done
counts='(passed|skipped|failed|error).* in '
((${#usable[@]} == 0)) || export KVMEM_CUDART_PATH=${usable[0]}
step doctor 30 '^CUDA is ' doctor
if ((${#usable[@]} == 0)); then
  step tests 60 "$counts" tests tests/gpu -m gpu
  finish "no GPU can be used: ${why:-there is no CUDA runtime in the pack}" 3
fi

export KVMEM_TEST_GPU=1
for library in "${usable[@]}"; do
  filter='Cuda/*/Gpu*'
  [[ $library == "${usable[0]}" ]] || filter='Cuda/*/Gpu' # in batches: the rest is the same
  step "contract-${library##*.}" 75 'tests? ran|PASSED' contract "$library" "$filter"
done
step tests 110 "$counts" tests tests/gpu -m gpu --durations=5
step bench 90 "$counts" tests bench/gpu -p pytest_benchmark.plugin --benchmark-only \
  --results "$logs/bench.md"
((failed)) && finish "something failed: see above" 1
finish "all is well" 0
