"""Peak memory of one implementation, measured in a separate process (`measured_process`)."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.comparison import Entry
from harness.machine import Machine

_BENCHMARKS = Path(__file__).parents[1]


@functools.cache
def probed(kind: str, name: str, lengths: tuple[int, ...], device: str) -> tuple[dict[int, Any], str]:
    """Run the process; return its measurements by length, and how it ended if it did not reach the
    last."""
    program = [sys.executable, "-m", "implementations.measured_process"]
    command = [*program, kind, name, ",".join(map(str, lengths)), device]
    path = os.pathsep.join([str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reason = (done.stderr.strip().splitlines() or ["killed: out of memory?"])[-1]
    return {line.pop("length"): line for line in lines}, f"exit status {done.returncode}: {reason}"


def probe(kind: str, name: str, lengths: tuple[int, ...], length: int, machine: Machine, checked: Any) -> Entry:
    """Make an entry that measures seconds and peak memory; arguments as of `measured_process`."""
    extra: dict[str, Any] = {}

    def run() -> float:
        found, end = probed(kind, name, lengths, machine.kind)
        if length not in found:
            raise RuntimeError(end)
        extra.update(found[length])
        return float(extra.pop("seconds"))

    return Entry(run, checked, warm_up=False, maximum=1, extra=extra)
