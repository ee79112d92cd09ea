"""Compiles the Triton kernels for AMD's GPUs, without one and without ROCm.

    python tools/amd.py                    every kernel, dtype and width, for gfx942 and gfx1100
    python tools/amd.py --only "decode"    those whose line holds this

A line for each: bytes of shared memory, vector registers and how many are spilled, matrix
instructions. The tiles are those of NVIDIA's sm_80: nothing was chosen for AMD, nothing has run
there, and the backend refuses ROCm. Fails where one does not compile or takes more shared memory
than there is.
"""

import argparse
import concurrent.futures
import re
import sys

from aot import Variant, compile_variant
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from txl_kernels.backends.triton import config

TARGETS = [GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx1100", 32)]
KEYS_OUTSIDE = ("backward_keys", "backward_table")
SHARED_LIMIT = 64 * 1024  # bytes a program may have, on both


class Device:
    """As much of a driver as kernels ask at compile time: for what they are compiled."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target


def variants(target: GPUTarget) -> list[Variant]:
    plain = [
        Variant(kernel, 80, dtype, width, atomics=kernel == "backward_queries")
        for kernel in config.KERNELS
        for dtype in ("bf16", "fp32")
        for width in (64, 128, 256)
    ]
    half = [Variant(kernel, 80, "fp16", 64) for kernel in config.KERNELS]
    bounds, tables = ([v._replace(**option) for v in half] for option in ({"bounds": True}, {"tables": "both"}))
    # On gfx942 LLVM of Triton 3.9 aborts over dropout in forward and backward of queries.
    dropped = [v._replace(dropout=True) for v in half if target.arch != "gfx942" or v.kernel in KEYS_OUTSIDE]
    return plain + bounds + tables + dropped


def name(v: Variant, target: GPUTarget) -> str:
    return f"{target.arch} {v}".replace(" sm_80", "")


def examine(v: Variant, target: GPUTarget) -> tuple[str, bool]:
    """What is said of a kernel, and whether a device could take it."""
    driver.set_active(Device(target))
    try:
        compiled = compile_variant(v, v.config(), target=target)
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    code = compiled.asm["amdgcn"]
    registers, spilled = (re.findall(rf"\.{field}:\s*(\d+)", code)[0] for field in ("vgpr_count", "vgpr_spill_count"))
    products = len(re.findall(r"\bv_(?:mfma|wmma)_", code))
    shared = compiled.metadata.shared
    return f"shared {shared}, registers {registers}, spilled {spilled}, products {products}", shared <= SHARED_LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    bad = 0
    chosen = [(v, target) for target in TARGETS for v in variants(target) if only in name(v, target)]
    if not chosen:
        parser.error(f"no kernel's line holds {only!r}")
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for (v, target), (text, good) in zip(chosen, pool.map(examine, *zip(*chosen, strict=True)), strict=True):
            bad += not good
            print(f"{name(v, target)}: {text}{'' if good else ' - NOT TO BE LOADED'}", flush=True)
    print(f"{len(chosen)} kernels, {bad} of them not to be loaded")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
