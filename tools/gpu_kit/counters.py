"""The profiler's counters of every kernel of one small training call."""

import csv
import io
from dataclasses import replace
from typing import Any

from gpu_kit import cases
from gpu_kit.measure import alive, device
from gpu_kit.records import Record
from gpu_kit.work import both, choices, tensors

KERNELS = "regex:(forward|backward_queries|backward_keys|backward_table)_kernel"
COMMAND = ["ncu", "--set", "full", "--clock-control", "none", "--csv", "--page", "details", "-k", KERNELS]
KEPT = (
    "Duration", "SM Frequency", "Elapsed Cycles", "Compute (SM) Throughput", "Memory Throughput", "L1/TEX Cache Throughput",
    "L2 Cache Throughput", "DRAM Throughput", "Executed Ipc Active", "Issue Slots Busy", "Registers Per Thread",
    "Dynamic Shared Memory Per Block", "Theoretical Occupancy", "Achieved Occupancy", "No Eligible",
    "Local Memory Spilling Requests",
)  # fmt: skip


def small(width: int) -> None:
    """What the profiler watches: one call, kernels compiled by an earlier one."""
    work = replace(next(cases.timed()), L=512, M=512, D=width)
    with choices(work):
        both(work, tensors(work, device()))
    alive()


def parse(text: str) -> dict[str, dict[str, str]]:
    """kernel -> metric -> value and unit, of the profiler's CSV, whatever else was printed."""
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        if row.get("Metric Name") in KEPT:
            found.setdefault(row["Kernel Name"], {})[row["Metric Name"]] = (
                f"{row['Metric Value']} {row['Metric Unit']}".strip()
            )
    return found


def keep(record: Record, text: str, width: int) -> None:
    found: dict[str, Any] = parse(text)
    for kernel, metrics in found.items():
        record.add(step="counters", item=f"D{width} {kernel}", state="measured", metrics=metrics)
    if not found:
        raise SystemExit("the profiler printed no metrics:\n" + text[-600:])
