#!/usr/bin/env bash
# Everything a GPU can tell, cheapest and most informative first, each step under its own time limit, so that a run cut
# short still leaves results: bash tools/gpu_check.sh [output folder]. Needs torch with CUDA, triton, pytest, hypothesis and
# the build tools (pybind11, cmake, ninja, setuptools) installed; no network. Copy its JSON to benchmarks/results/.
#
# It ends within SECONDS_TOTAL (570); SECONDS_BENCH and SECONDS_TESTS move the limits of the two long steps. INTERPRETER=1
# tries the whole script on a CPU, in Triton's interpreter; the CUDA C++ kernels take no part then.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-gpu-check}}
mkdir -p "$out"
out=$(cd "$out" && pwd)
PYTHON=${PYTHON:-python3}
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # deterministic algorithms ask for it
export PYTHONFAULTHANDLER=1
export PATH=$PATH:/usr/local/cuda/bin # nvcc, compute-sanitizer
summary=$out/summary.txt
log=$out/log.txt
: >"$summary"
: >"$log"
failed=0
total=${SECONDS_TOTAL:-570}
step_log=$(mktemp)
trap 'rm -f "$step_log"*' EXIT

say() { printf '%s\n' "$*" | tee -a "$summary"; }

# step NAME LIMIT COMMAND...: runs it, logs it, and says how it ended.
step() {
  local name=$1 limit=$2 started=$SECONDS code=0
  shift 2
  [ "$limit" -lt $((total - SECONDS)) ] || limit=$((total - SECONDS))
  if [ "$limit" -lt 5 ]; then
    say "$name: not run, the time is up"
    return 1
  fi
  printf '\n=== %s\n' "$name" >>"$log"
  timeout --kill-after=10 "$limit" "$@" >"$step_log" 2>&1 || code=$?
  cat "$step_log" >>"$log"
  say "$name: exit $code after $((SECONDS - started)) s (limit $limit)"
  if [ "$code" != 0 ]; then
    failed=1
    tail -n 12 "$step_log" | tee -a "$summary"
  fi
  return "$code"
}

marker=gpu
device=cuda
if [ "${INTERPRETER:-0}" = 1 ]; then
  export TRITON_INTERPRET=1
  marker=triton
  device=interpreter
else
  step device 30 nvidia-smi
fi

# Triton needs no compiler, so after a failed build, which is reported, what does build is used.
build() { step "$1" "$2" env TXL_KERNELS_CUDA="$3" "$PYTHON" -m pip install --no-build-isolation --no-deps --quiet .; }
cuda=$([ "${INTERPRETER:-0}" = 1 ] && echo off || echo on)
build install 200 "$cuda" || build "install without CUDA C++" 100 off || export PYTHONPATH=$PWD
step diagnosis 60 env PYTHONSAFEPATH=1 "$PYTHON" -m txl_kernels && tee -a "$summary" <"$step_log"

# Does it run at all, in a minute; the rest of the tests come after the first figures.
step smoke 120 env PYTHONSAFEPATH=1 "$PYTHON" -m pytest -q -p no:cacheprovider -m "$marker" --backends triton \
  tests/txl_kernels/api/test_values.py -k "matches_the_definition and (episodes or dropout)" &&
  tail -n 1 "$step_log" | tee -a "$summary"
if [ "${INTERPRETER:-0}" != 1 ]; then
  step "smoke, cuda" 60 env PYTHONSAFEPATH=1 "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu tests/txl_kernels/cuda/test_values.py &&
    tail -n 1 "$step_log" | tee -a "$summary"
fi
seconds=${SECONDS_BENCH:-200}
step bench "$((seconds + 40))" env PYTHONSAFEPATH=1 "$PYTHON" -m pytest -q -p no:cacheprovider --benchmark-only \
  --device "$device" --deadline "$seconds" --record "$out/gpu.json" \
  benchmarks/groups/test_{attention,evaluation,memory,training,options,calls,tiles}.py
# Nearly all of a test's time goes into compiling kernels, so the tests are shared out to the cores.
tests_in_parallel() {
  local shards=$1 codes=0 pids=() k
  for k in $(seq "$shards"); do
    env PYTHONSAFEPATH=1 TESTS_SHOW_FAILURES=1 "$PYTHON" -m pytest -q -p no:cacheprovider -m "$marker" --backends triton \
      --tb=no --shard "$k/$shards" tests/txl_kernels >"$step_log.$k" 2>&1 &
    pids+=($!)
  done
  trap 'kill "${pids[@]}" 2>/dev/null; cat "$step_log".*' TERM
  for k in "${pids[@]}"; do wait "$k" || codes=1; done
  cat "$step_log".*
  return "$codes"
}
export -f tests_in_parallel
export PYTHON marker step_log
cores=$(nproc)
step tests "${SECONDS_TESTS:-200}" bash -c 'tests_in_parallel "$0"' "$((cores > 12 ? 12 : cores))"
grep -hE "^(FAILED|ERROR)|passed|failed" "$step_log" | tee -a "$summary"
if command -v compute-sanitizer >/dev/null && [ "${INTERPRETER:-0}" != 1 ]; then
  # The CUDA C++ kernels without Python around them: tests/txl_kernels/cuda/driver.cpp prints "right" and has no other output.
  if step "build the driver" 60 nvcc -std=c++17 -arch=native -I csrc/cuda -x cu tests/txl_kernels/cuda/driver.cpp csrc/cuda/launch.cu \
    -o "$step_log.driver"; then
    for tool in memcheck racecheck initcheck synccheck; do
      step "$tool, cuda" 30 compute-sanitizer --tool "$tool" --error-exitcode 9 "$step_log.driver" && tee -a "$summary" <"$step_log"
    done
  fi
  export PYTHONSAFEPATH=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1
  memcheck=(compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9
    "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu --backends triton)
  step "memcheck, cuda from Python" "${SECONDS_MEMCHECK:-60}" "${memcheck[@]}" tests/txl_kernels/cuda/test_values.py \
    -k "device and (width or parts or intervals)"
  step memcheck "${SECONDS_MEMCHECK:-60}" "${memcheck[@]}" tests/txl_kernels/api/test_values.py \
    -k "matches_the_definition and (41 or episodes or block)"
fi

[ -f "$out/gpu.json" ] && PYTHONPATH=benchmarks "$PYTHON" - "$out/gpu.json" <<'PY' | tee -a "$summary"
import json, sys

from harness.case import Case

run = json.load(open(sys.argv[1]))
print("\n".join(f"{name}: {value}" for name, value in run["about"].items()))
for r in run["rows"]:
    what = f"{r['group'][:24]:24} {str(Case.from_json(r['case']))[:48]:48} {r['implementation'][:40]:40}"
    rates = " ".join(f"{r[n]:.0f} {unit}" for n, unit in (("gflops", "GFLOP/s"), ("gb_per_s", "GB/s")) if n in r)
    rates += f" {r['peak_mib']:.0f} MiB" if "peak_mib" in r else ""
    rates += " disturbed" if "disturbed" in r else ""
    print(what, f"{r['median_ms']:9.3f} ms {rates}" if "median_ms" in r else f"{r['status']}: {r['error'][:120]}")
PY
exit "$failed"
