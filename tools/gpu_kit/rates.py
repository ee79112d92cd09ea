"""Rates of additions in the L2, measured by rates.cu."""

import json
import subprocess
from pathlib import Path

from gpu_kit.records import Record

SOURCE = Path(__file__).with_name("rates.cu")


def build(into: Path) -> list[str]:
    """The command."""
    return ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", str(SOURCE), "-o", str(into)]


def run(record: Record, program: Path) -> None:
    """Every line that it prints is a measurement; sums that are wrong are a failure."""
    done = subprocess.run([program], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        row = json.loads(line)
        state = "measured" if row["sum"] == row["expected"] else "failed"
        reason = {} if state == "measured" else {"reason": f"its sum is {row['sum']}, not {row['expected']}"}
        record.add(step="rates", state=state, **row, **reason)
    if done.returncode:
        raise SystemExit(done.stderr)
