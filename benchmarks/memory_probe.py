"""Peak memory of one contestant, in a process of its own: python memory_probe.py WORK NAME LENGTHS DEVICE.

WORK: "attention" (forward and backward, B1 H8 D64, L = M) or "step" (a training step of two layers of enwik8-base's
sizes, B1). LENGTHS, separated by commas, are measured in this order after a tiny one, so that libraries loaded at the
first use do not count. Prints a line of JSON for each: length, seconds, and peak_mib beyond what was there before, that
is beyond the inputs or the parameters (before_mib).
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from contestants import OTHERS, entry, ours
from inputs import Shape
from machine import Machine


def work(kind: str, name: str, length: int, machine: Machine) -> Callable[[], object]:
    if kind == "attention":
        return entry((ours(machine) | OTHERS)[name], machine, Shape(1, 8, length, length, 64), backward=True).run
    import models
    import test_training

    config = replace(models.ENWIK8_BASE, n_layer=2, mem_len=length)
    return test_training.step(test_training.TRAINED[name], config, 1, length, machine.device)


def _high_water() -> float:
    """MiB: the largest resident size since the last reset (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def measured(run: Callable[[], object], machine: Machine) -> dict[str, float]:
    if machine.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        seconds = machine.wall(run)
        return {
            "seconds": seconds,
            "peak_mib": torch.cuda.max_memory_allocated() / 2**20 - before,
            "before_mib": before,
        }
    machine.free_memory()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # forgets the peak so far
    before = _high_water()
    begin = time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - begin, "peak_mib": _high_water() - before, "before_mib": before}


if __name__ == "__main__":
    kind, name, lengths, device = sys.argv[1:]
    machine = Machine(device)
    work(kind, name, 16, machine)()
    for length in map(int, lengths.split(",")):
        print(json.dumps({"length": length} | measured(work(kind, name, length, machine), machine)), flush=True)
