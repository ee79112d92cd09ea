"""Number of programs of a compiled kernel that a multiprocessor runs at once."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
REGISTERS, THREADS, WARP = 65536, 2048, 32
SHARED = {80: 164 * 1024, 90: 228 * 1024}  # bytes of a multiprocessor, by capability
RESERVED = 1024  # bytes reserved by each program


def registers(compiled: Any) -> int:
    """Return the registers of a thread, from the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "k.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        told = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", told)[1])  # type: ignore[index]


def programs(compiled: Any, capability: int) -> int:
    """Return the number of programs of a kernel compiled by Triton."""
    threads = WARP * compiled.metadata.num_warps
    return programs_of(registers(compiled), compiled.metadata.shared, threads, capability)


def programs_of(registers: int, shared: int, threads: int, capability: int) -> int:
    """Return the number of programs that registers (allocated in units of 8 per thread), shared
    memory (bytes) and threads allow."""
    by_registers = REGISTERS // (threads * -(-registers // 8) * 8)
    return min(by_registers, SHARED[capability] // (shared + RESERVED), THREADS // threads)
