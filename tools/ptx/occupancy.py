"""How many programs of a compiled kernel a multiprocessor runs at once."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
REGISTERS, THREADS, WARP = 65536, 2048, 32
SHARED = {80: 164 * 1024, 90: 228 * 1024}  # bytes a multiprocessor
RESERVED = 1024  # of them for each program


def registers(compiled: Any) -> int:
    """Of a thread, by the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "k.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        told = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", told)[1])  # type: ignore[index]


def programs(compiled: Any, capability: int) -> int:
    """Of a kernel as Triton compiled it."""
    threads = WARP * compiled.metadata.num_warps
    return programs_of(registers(compiled), compiled.metadata.shared, threads, capability)


def programs_of(registers: int, shared: int, threads: int, capability: int) -> int:
    """Bound by registers (given out by 8 a thread), shared memory (bytes) and threads."""
    by_registers = REGISTERS // (threads * -(-registers // 8) * 8)
    return min(by_registers, SHARED[capability] // (shared + RESERVED), THREADS // threads)
