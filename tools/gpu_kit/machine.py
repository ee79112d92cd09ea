"""What the device is, and its ceilings: a copy's bandwidth, the library's matrix products."""

import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import triton

import txl_kernels
from gpu_kit.measure import device, measure, smi
from gpu_kit.records import Items

COPIED = 2**32  # bytes
MATRIX = 8192


def versions(kit: Path) -> dict[str, Any]:
    """Of software, and the commit that was prepared."""
    prepared = kit / "kit.json"
    found = {
        "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "txl_kernels": txl_kernels.__version__, "cores": os.cpu_count(),
        "commit": os.environ.get("BENCHMARK_COMMIT"),
        "tools": {name: shutil.which(name) for name in ("nvcc", "ncu", "compute-sanitizer", "cuobjdump", "gcc")},
        "prepared": json.loads(prepared.read_text()) if prepared.exists() else None,
    }  # fmt: skip
    return found | ({"driver": smi("driver_version")} if torch.cuda.is_available() else {})


def limits() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": "interpreter", "multiprocessors": 8}
    found = torch.cuda.get_device_properties(0)
    names = ("total_memory", "L2_cache_size", "regs_per_multiprocessor", "shared_memory_per_block_optin",
             "shared_memory_per_multiprocessor", "max_threads_per_multi_processor")  # fmt: skip
    clocks = dict(zip(("sm_mhz_now", "sm_mhz_most", "memory_mhz", "watts_most"), smi(
        "clocks.sm,clocks.max.sm,clocks.mem,power.limit").split(", "), strict=True))  # fmt: skip
    return {
        "name": found.name, "capability": [found.major, found.minor], "multiprocessors": found.multi_processor_count,
        **{name: getattr(found, name, None) for name in names}, **clocks,
    }  # fmt: skip


def copy() -> dict[str, Any]:
    """Bytes read and written."""
    source = torch.ones(COPIED if torch.cuda.is_available() else 2**20, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    found = measure(lambda: target.copy_(source))
    return found | {"gb_per_s": 2 * source.numel() / found["ms"] / 1e6}


def products() -> dict[str, Any]:
    """bfloat16, of random numbers: of zeros they run faster."""
    n = MATRIX if torch.cuda.is_available() else 64
    a, b = torch.randn(2, n, n, device=device(), dtype=torch.bfloat16)
    found = measure(lambda: a @ b)
    return found | {"tflops": 2 * n**3 / found["ms"] / 1e9}


def items(kit: Path) -> Items:
    return [("versions", lambda: versions(kit)), ("limits", limits), ("copy", copy), ("matrix products", products)]
