"""Peak memory against length, L = M: attention alone and a training step; each measured in a process of its own."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import test_training
from contestants import DENSE, EAGER, ORIGINAL, OTHERS, YARDSTICK, check, ours
from machine import Machine
from race import Entry, Race, races

_PROBE = Path(__file__).with_name("memory_probe.py")


@functools.cache
def probed(kind: str, name: str, lengths: tuple[int, ...], device: str) -> tuple[dict[int, dict[str, float]], str]:
    """What the process measured for each length, and how it ended if before the last."""
    command = [sys.executable, str(_PROBE), kind, name, ",".join(map(str, lengths)), device]
    path = os.pathsep.join(filter(None, [str(_PROBE.parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}  # also where PYTHONSAFEPATH is set
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reason = (done.stderr.strip().splitlines() or ["killed: out of memory?"])[-1]
    return {line.pop("length"): line for line in lines}, f"exit status {done.returncode}: {reason}"


def probe(kind: str, name: str, lengths: tuple[int, ...], length: int, machine: Machine, checked: Any) -> Entry:
    extra: dict[str, Any] = {}

    def run() -> float:
        found, end = probed(kind, name, lengths, machine.kind)
        if length not in found:
            raise RuntimeError(end)
        extra.update(found[length])
        return float(extra.pop("seconds"))

    return Entry(run, checked, warm_up=False, most=1, extra=extra)


def attention(machine: Machine, full: bool) -> list[Race]:
    if machine.kind == "rehearsal" or not machine.backends:
        return []
    for_all, for_ours = machine.pick(
        cpu=((512, 1024, 2048) + (4096,) * full, (4096,) * (not full) + (8192, 16384) * full),
        cuda=((1024, 2048, 4096, 8192), (32768,)),
        rehearsal=((), ()),
    )
    mine = ours(machine)
    others = {n: OTHERS[n] for n in (ORIGINAL, EAGER, DENSE, YARDSTICK)}
    found = []
    for length in for_all + for_ours:
        runs = {}
        for name, call in (mine | (others if length in for_all else {})).items():
            checked = functools.partial(check, call, True, machine.dtype, machine.device)
            lengths = for_all + (for_ours if name in mine else ())
            arguments = ("attention", name, lengths, length, machine, None if name == YARDSTICK else checked)
            runs[name] = functools.partial(probe, *arguments)
        case = f"attention, forward+backward, B1 H8 D64, L = M = {length}"
        found.append(Race("peak memory", case, runs, clock="own", least=1))
    return found


@races(attention)
def test_attention_memory(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


def training_step(machine: Machine, full: bool) -> list[Race]:
    if machine.kind == "rehearsal" or not machine.backends:
        return []
    runs = {}
    for name, make in test_training.TRAINED.items():
        checked = functools.partial(test_training.check, make, machine.device)
        runs[name] = functools.partial(probe, "step", name, (2048,), 2048, machine, checked)
    case = "training step, enwik8-base sizes, 2 layers, B1, L = M = 2048"
    return [Race("peak memory", case, runs, clock="own", least=1)]


@races(training_step)
def test_training_step_memory(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)
