"""Triton's kernels compile for AMD's GPUs; the smallest of them. `make aot` compiles more."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

from txl_kernels.backends.protocol import gpu_lacks

ROOT = Path(__file__).parents[2]


def test_a_kernel_compiles_for_both(tmp_path: Path) -> None:
    """With matrix instructions of each, and no PTX in it, which AMD's assembler does not take."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), TRITON_CACHE_DIR=str(tmp_path))
    command = [sys.executable, str(ROOT / "tools" / "amd.py"), "--only", "backward_table bf16 D64"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "2 kernels, 0 of them not to be loaded"
    assert [line.split()[0] for line in lines] == ["gfx942", "gfx1100"]
    assert all(int(line.rpartition("products ")[2]) > 0 for line in lines)


def test_rocm_is_refused_with_the_reason() -> None:
    with mock.patch.object(torch.version, "hip", "6.4"):
        assert "ROCm is refused" in (gpu_lacks.__wrapped__(torch.device("cuda")) or "")
