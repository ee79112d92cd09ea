"""An implementation's peak memory, in a process of its own: groups/memory_probe.py."""

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
_PROBE = _BENCHMARKS / "groups" / "memory_probe.py"
_TESTS = _BENCHMARKS.parent / "tests"
_PATHS = [_BENCHMARKS, _TESTS / "support", _TESTS / "integrations"]  # of what the probe imports


@functools.cache
def probed(
    kind: str, algorithm: str, backend: str, lengths: tuple[int, ...], device: str
) -> tuple[dict[int, Any], str]:
    """What the process measured for each length, and how it ended if before the last."""
    command = [sys.executable, str(_PROBE), kind, algorithm, backend, ",".join(map(str, lengths)), device]
    path = os.pathsep.join([*map(str, _PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reason = (done.stderr.strip().splitlines() or ["killed: out of memory?"])[-1]
    return {line.pop("length"): line for line in lines}, f"exit status {done.returncode}: {reason}"


def probe(
    kind: str, algorithm: str, backend: str, lengths: tuple[int, ...], length: int, machine: Machine, checked: Any
) -> Entry:
    extra: dict[str, Any] = {}

    def run() -> float:
        found, end = probed(kind, algorithm, backend, lengths, machine.kind)
        if length not in found:
            raise RuntimeError(end)
        extra.update(found[length])
        return float(extra.pop("seconds"))

    return Entry(run, checked, warm_up=False, most=1, extra=extra)
