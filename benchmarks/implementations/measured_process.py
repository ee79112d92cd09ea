"""Measurement of one implementation's peak memory in a separate process: python -m
implementations.measured_process WORK NAME LENGTHS DEVICE.

WORK: "attention" (forward and backward, B1 H8 D64, L = M), "step" (a training step of two layers
with enwik8-base's sizes, B1), "peer" (another library's layer), "encoder" (a whole one, forward) or
"onnx" (layers in ONNX Runtime, forward).
NAME: of the implementation; for "peer" and "encoder" the method and the title, for "onnx" the
method and the number of layers. LENGTHS, separated by commas, are measured in this order after a
tiny one, so that libraries loaded on first use do not count.
It prints a line of JSON for each length, with length, seconds, and peak_mib above the memory used
before by inputs or parameters.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from harness.case import Shape
from harness.machine import Machine
from implementations.attention import OTHERS, entry, ours


def work(kind: str, name: str, length: int, machine: Machine) -> Callable[[], object]:
    if kind == "attention":
        found = next(x for x in (*ours(machine), *OTHERS) if x.name == name)
        return entry(found, machine, Shape(1, 8, length, length, 64), backward=True).run
    if kind in ("peer", "encoder"):
        from implementations import peers

        method, _, title = name.partition(" ")
        if kind == "encoder":
            return peers.encoder_entry(title, method, length).run
        return peers.layer_step(title, method, max(length, min(peers.BATCHES)), backward=True)
    if kind == "onnx":
        from implementations import onnx_encoders

        method, layers = name.split()
        return onnx_encoders.run_of(_session(method, int(layers)), length)
    from implementations.models import ENWIK8_BASE  # not imported for attention alone
    from implementations.training import TRAINED, step

    config = replace(ENWIK8_BASE, n_layer=2, mem_len=length)
    return step(TRAINED[name].make, config, 1, length, machine.device)


@functools.cache
def _session(method: str, layers: int) -> Any:
    from implementations import onnx_encoders

    return onnx_encoders.session_of(method, onnx_encoders.exported(layers, True)[1], layers)


def _high_water() -> float:
    """Return the largest resident size since the last reset, in MiB (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def measured(run: Callable[[], object], machine: Machine) -> dict[str, float]:
    if machine.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        seconds = machine.wall(run)
        return {"seconds": seconds, "peak_mib": torch.cuda.max_memory_allocated() / 2**20 - before}
    machine.free_memory()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # resets the peak
    before = _high_water()
    begin = time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - begin, "peak_mib": _high_water() - before}


if __name__ == "__main__":
    kind, name, lengths, device = sys.argv[1:]
    machine = Machine(device)
    work(kind, name, 16, machine)()
    for length in map(int, lengths.split(",")):
        print(json.dumps({"length": length} | measured(work(kind, name, length, machine), machine)), flush=True)
