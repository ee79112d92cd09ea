#!/usr/bin/env bash
# The package's wheel, one for each Python, under every torch given: kernels, layers, models and training, on a CPU.
# usage: tools/matrix.sh PYTHON:TORCH ...    as in tools/matrix.sh 3.11:2.6.0 3.11:2.13.0 3.13: (the newest torch)
# Needs those interpreters (pythonX.Y on the PATH), a C++ compiler and the registry. A torch with CUDA takes 6 GB in
# $TMPDIR until its turn is over. TESTS names other files of tests. Prints a line for each, says what failed, and exits
# with 1 if one did.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n 's/^# //p' "$0" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Tests beside no sources import what is installed.
mkdir "$work/tree"
cp -r pyproject.toml setup.py CMakeLists.txt tests benchmarks tools "$work/tree"
# What depends on torch: not the C++ alone, nor values that hypothesis draws. torch 2.6 compiles layers, no whole loss.
tests=${TESTS:-$(cd "$work/tree" && ls tests/txl_kernels/api/test_*.py tests/txl_kernels/cpu/test_native.py \
  tests/txl_kernels/cuda/test_module.py \
  tests/txl/{model,training,evaluation,paper}/test_*.py | grep -vE "accuracy|identities|properties|model/test_compile")}

one() { # PYTHON TORCH: installs, imports, tests; the last line of its output says what pytest counted
  local bin="$work/env/bin" dist="$work/dist-$1"
  "python$1" -m venv "$work/env"
  [ -d "$dist" ] || TXL_KERNELS_CUDA=off "$bin/pip" wheel -q --no-deps --no-cache-dir -w "$dist" .
  "$bin/pip" install -q --no-cache-dir "torch${2:+==$2}"
  "$bin/pip" install -q "$(echo "$dist"/*.whl)[plots,tensorboard]" "setuptools>=77" pybind11 pytest pytest-xdist pytest-benchmark hypothesis
  cd "$work/tree"
  "$bin/python" -W error -c "import torch, txl_kernels, txl, txl.commands.cli"
  # shellcheck disable=SC2086 # a list of files
  OMP_NUM_THREADS=1 "$bin/pytest" $tests -m "not slow and not nightly" -k "not source_tree" -q -n auto -p no:cacheprovider
}

failed=0
for pair in "$@"; do
  said="$work/said-$pair"
  # Not in a condition, where bash would go on after an error.
  set +e
  (set -e; one "${pair%%:*}" "${pair#*:}") > "$said" 2>&1
  code=$?
  set -e
  rm -rf "$work/env"
  printf 'Python %s, torch %s: %s: %s\n' "${pair%%:*}" "${pair#*:}" "$([ $code = 0 ] && echo passed || echo FAILED)" \
    "$(tail -n 1 "$said")"
  [ $code = 0 ] || { failed=1; cat "$said" >&2; }
done
sha256sum "$work"/dist-*/*.whl
exit $failed
