"""Training by several processes on one machine, against one process with all of its threads.

pytest benchmarks/groups/test_processes.py --benchmark-only
"""

import functools

from harness.case import Case
from harness.comparison import Comparison, Implementation, comparisons
from harness.machine import Machine
from implementations.processes import entry


@comparisons("cpu", backend=None)
def test_processes(machine: Machine, full: bool) -> list[Comparison]:
    found = []
    for model, layers, batch, length in (("laptop", 4, 8, 128), ("enwik8-base", 2, 4, 512)):
        ways = [
            ("2 processes (DDP), half the threads each", "ddp", "ours", 2),
            ("1 process, all threads", "one", "baseline", 1),
        ]
        threads = max(machine.threads, 2)
        implementations = [
            Implementation(name, way, functools.partial(entry, count, threads // count, model, batch, length), role)
            for name, way, role, count in ways
        ]
        case = Case(unit="token", model=model, layers=layers, note=f"an update, batch {batch}, segments of {length}")
        found.append(Comparison("processes", case, implementations, clock="wall", seconds=12, minimum=3, maximum=60))
    return found
