#!/usr/bin/env bash
# A borrowed GPU for half an hour, in three calls of at most nine minutes, after `make gpu-kit` on any machine:
#     bash tools/gpu_check.sh 1|2|3 [output folder]
# Each leaves callN.jsonl, a line a measurement, whatever fails; `python -m gpu_kit summary FOLDER` tells what came of it
# (see tools/gpu_kit). Needs torch with CUDA, triton and pytest; no network. Works without gpu-kit/, too, then everything
# is compiled there. INTERPRETER=1 tries it all on a CPU, in Triton's interpreter; the CUDA C++ kernels take no part then.
set -uo pipefail
cd "$(dirname "$0")/.."
number=${1:?which call: 1, 2 or 3}
out=${2:-${OUT:-gpu-check}}
export PYTHONPATH=$PWD:$PWD/tools${PYTHONPATH:+:$PYTHONPATH}
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # deterministic algorithms ask for it
export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PATH=$PATH:/usr/local/cuda/bin # nvcc, compute-sanitizer, ncu
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/txl-gpu-kit/triton}
[ "${INTERPRETER:-0}" = 1 ] && export TRITON_INTERPRET=1
PYTHON=${PYTHON:-python3}
"$PYTHON" -m gpu_kit call "$number" "$out"
code=$?
"$PYTHON" -m gpu_kit summary "$out"
exit "$code"
