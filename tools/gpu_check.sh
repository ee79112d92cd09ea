#!/usr/bin/env bash
# A borrowed GPU for half an hour, in three calls of at most nine minutes, after `make gpu-kit` on any machine:
#     bash tools/gpu_check.sh 1|2|3 [output folder]
# 1: each kind of call that users make, once, in a process for each group of head widths, then the tests; 2: what takes longer, sanitizers, the same
# bits; 3: benchmarks, whose gpu.json goes to benchmarks/results/, and microseconds of each kernel. Each leaves callN.txt, a line a step, and callN.log, all that was printed, whatever fails.
# Needs torch with CUDA, triton and pytest; no network. Works without gpu-kit/, too, then everything is compiled there.
# INTERPRETER=1 tries it on a CPU, in Triton's interpreter; the CUDA C++ kernels take no part then.
set -uo pipefail
cd "$(dirname "$0")/.."
number=${1:?which call: 1, 2 or 3}
out=${2:-${OUT:-gpu-check}}
total=${SECONDS_TOTAL:-520} # of a call, beyond which nothing is started and everything is ended
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:$PWD/tools:$PWD/gpu-kit/site${PYTHONPATH:+:$PYTHONPATH}
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # deterministic algorithms ask for it
export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PATH=$PATH:/usr/local/cuda/bin # nvcc, compute-sanitizer
export TRITON_DEFAULT_FP_FUSION=1     # the default, but part of a kernel's name where it is set: as gpu_kernels.py does
[ -d gpu-kit/triton ] && export TRITON_CACHE_DIR=$PWD/gpu-kit/triton
[ -f gpu-kit/commit ] && BENCHMARK_COMMIT=$(cat gpu-kit/commit) && export BENCHMARK_COMMIT
mkdir -p "$out"
out=$(cd "$out" && pwd)
log=$out/call$number.log told=$out/call$number.txt bad=0
: >"$log"
: >"$told"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# step NAME SECONDS COMMAND...: what it prints goes to the log, how it ended to the other file, at once.
step() {
  local name=$1 limit=$2 left=$((total - SECONDS)) begun=$SECONDS code=0
  shift 2
  if [ "$left" -lt 5 ]; then
    echo "$name: not run, the time is up" | tee -a "$told"
    bad=1
    return
  fi
  printf '\n=== %s\n' "$name" >>"$log"
  timeout -k 5 "$((limit < left ? limit : left))" "$@" >>"$log" 2>&1 || code=$?
  case $code in
    0) echo "$name: done, $((SECONDS - begun)) s: $(tail -n 1 "$log" | cut -c -150)" ;;
    124 | 137) echo "$name: at its limit after $((SECONDS - begun)) s" ;;
    *) echo "$name: exit status $code after $((SECONDS - begun)) s: $(tail -n 1 "$log" | cut -c -150)" ;;
  esac | tee -a "$told"
  [ "$code" = 0 ] || bad=1
}

# device NAME SECONDS COMMAND...: a step that the interpreter cannot rehearse.
device() { [ "${INTERPRETER:-0}" = 1 ] || step "$@"; }

has() { "$python" -c "import $1" 2>>"$log"; }

# Benchmarks take the kernels as users do, tests those that end a wait which lasts for seconds.
kit=gpu-kit/limited clocks=10000000000
[ "$number" = 3 ] && kit=gpu-kit/wheel clocks=0

loaded() { "$python" tools/gpu_card.py built "$clocks"; }

# The compiled modules: those of the carried wheel where they fit the GPU, put beside their Python, or built here for it.
modules() {
  loaded && return
  cp "$kit"/txl_kernels/_*.so txl_kernels/ && loaded && return
  PYTHONPATH=gpu-kit/setuptools:$PYTHONPATH TXL_KERNELS_CUDA=on \
    CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=$("$python" tools/gpu_card.py architecture) -DTXL_CLOCK_LIMIT=$clocks" \
    "$python" setup.py -q build_ext --inplace && loaded
}

# Each kind of call once, by head widths in processes of their own: one after the other they compile for ten minutes.
calls() {
  local bad=0 pids=() widths=("$@")
  for at in "${widths[@]}"; do
    "$python" -m txl_kernels --check $on_device --widths "$at" > "$scratch/calls-$at" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || bad=1; done
  for at in "${widths[@]}"; do cat "$scratch/calls-$at"; done
  for at in "${widths[@]}"; do printf ' widths %s: %s;' "$at" "$(tail -n 1 "$scratch/calls-$at" | cut -d, -f1,2)"; done | cut -c 2-
  return $bad
}
export -f loaded modules calls
export python kit clocks scratch

alone=("$python" -m pytest -q -p no:cacheprovider -p gpu_plugin)
many=("${alone[@]}") # nearly all of its time goes into compiling kernels; a process that a test ended is replaced
has pytest_timeout && many+=(--timeout 90 --timeout-method thread)
cores=$(nproc)
has xdist && many+=(-n "$((cores > 14 ? 12 : cores > 4 ? cores - 2 : 2))" --max-worker-restart 1000)
kernels=tests/txl_kernels
if [ "${INTERPRETER:-0}" = 1 ]; then
  export TRITON_INTERPRET=1
  marked=(-m triton --backends triton) on=interpreter seconds=30 on_device=cpu widths=(16)
  smoke=($kernels/api/test_values.py -k "matches_the_definition and window")
  right=($kernels/triton/test_triton.py -k "descriptors or parts")
  longer=($kernels/api/test_values.py -k "matches_the_definition and episodes")
else
  marked=(-m gpu --backends triton) on=cuda seconds=240 on_device=cuda:0 widths=(64 40,41,80 128,256 16,32)
  smoke=($kernels/triton/test_device.py -k "head_widths and 64 or graphs")
  right=($kernels/triton)
  longer=($kernels/api)
fi
export on_device
sanitizer() { echo compute-sanitizer --tool "$1" --target-processes all --error-exitcode 9; }

device card 30 bash -c 'nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem --format=csv || true'
device modules 300 bash -c modules
[ "$number" = 1 ] || export TXL_KERNELS_SELF_CHECK=off
case $number in
  1)
    step calls 300 bash -c 'calls "$@"' - "${widths[@]}"
    export TXL_KERNELS_SELF_CHECK=off # what follows compares by itself
    step smoke 120 "${many[@]}" "${marked[@]}" "${smoke[@]}"
    device "CUDA C++" 150 "${many[@]}" "${marked[@]}" $kernels/cuda
    step Triton 240 "${many[@]}" "${marked[@]}" "${right[@]}"
    device models 60 "${many[@]}" -m gpu tests/txl/evaluation
    ;;
  2)
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # or torch's pool hides what is out of bounds
    device "memcheck, narrow heads" 90 $(sanitizer memcheck) "$python" -m txl_kernels --check $on_device --widths 16,32
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
    step API 180 "${many[@]}" "${marked[@]}" "${longer[@]}"
    device "same bits" 60 "${alone[@]}" "${marked[@]}" $kernels/triton $kernels/cuda -k "same_bits or fixed_order"
    device "driver built" 90 nvcc -std=c++17 -arch=native -I csrc/cuda -x cu tests/txl_kernels/cuda/driver.cpp \
      csrc/cuda/decode/decode_launch.cu -o "$scratch/driver"
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in racecheck initcheck synccheck; do
      device "$tool, CUDA C++" 40 $(sanitizer $tool) "$scratch/driver"
    done
    device "memcheck, Triton" 60 $(sanitizer memcheck) "${alone[@]}" "${marked[@]}" $kernels/api/test_values.py \
      -k "matches_the_definition and (41 or episodes or block)"
    for tool in racecheck synccheck; do
      device "$tool, Triton" 40 $(sanitizer $tool) "$python" -m txl_kernels --check $on_device --widths 64
    done
    device "memcheck, CUDA C++" 60 $(sanitizer memcheck) "${alone[@]}" "${marked[@]}" $kernels/cuda/test_hopper.py \
      -k values_and_gradients
    ;;
  3)
    groups=(benchmarks/groups/test_{attention,evaluation,memory,training,options,calls}.py)
    timed=("${alone[@]}" --benchmark-only --device "$on")
    step benchmarks $((seconds + 50)) "${timed[@]}" --deadline "$seconds" --record "$out/gpu.json" "${groups[@]}"
    device kernels 90 bash -c '"$python" tools/gpu_kernels.py times | tee "$1"' - "$out/kernels.jsonl"
    ;;
esac
exit $bad
