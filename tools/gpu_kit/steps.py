"""Runs steps one after the other, each a process under limits, and records how each ended.

A step whose process dies, or writes nothing for its patience, is started again for the items that
it has not begun: one broken kernel costs one item.
"""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gpu_kit.records import Record

POLL = 0.1  # seconds
TAIL = 1200  # characters of its output, where it failed
LEAST = 5.0  # seconds worth starting a step for
OVER = "at its limit of"


@dataclass(frozen=True)
class Step:
    """One process. limit: seconds in all. patience: seconds between rows of the record; None for a
    process that writes none and is not started again. needs: a command without which it is not
    run. beside: runs while others do, until one comes that is `after` it. env: on top of the
    caller's."""

    name: str
    command: Sequence[str]
    limit: float
    patience: float | None = None
    needs: str | None = None
    beside: bool = False
    after: str | None = None
    env: dict[str, str] = field(default_factory=dict)


class Running:
    """A started process of a step, its output in a file."""

    def __init__(self, step: Step, folder: Path, limit: float) -> None:
        self.step, self.started, self.limit = step, time.monotonic(), limit
        self.log = folder / "log.txt"
        self.output = folder / f"{step.name.replace(' ', '-')}.running"
        self._out: IO[bytes] = open(self.output, "wb")  # noqa: SIM115  closed by wait
        self.process = subprocess.Popen(
            step.command, stdout=self._out, stderr=subprocess.STDOUT, env=os.environ | step.env, start_new_session=True
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def wait(self, record: Record) -> str | None:
        """Why it did not end well, and the end of what it said; None if it did."""
        try:
            how = self._watch(record)
        finally:
            end_all(self.process)
            self._out.close()
            said = self.output.read_text(errors="replace").strip()
            self.output.unlink()
            with open(self.log, "a", encoding="utf-8") as log:
                log.write(f"\n=== {self.step.name}\n{said}\n")
        return None if how is None else f"{how}: {said[-TAIL:]}"

    def _watch(self, record: Record) -> str | None:
        seen, since = _size(record), time.monotonic()
        while (code := self.process.poll()) is None:
            time.sleep(POLL)
            if _size(record) != seen:
                seen, since = _size(record), time.monotonic()
            if self.seconds > self.limit:
                return f"killed {OVER} {math.ceil(self.limit)} s"
            if self.step.patience is not None and time.monotonic() - since > self.step.patience:
                return f"killed after {self.step.patience:.0f} s without a row"
        if code == 0:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def end_all(process: "subprocess.Popen[bytes]") -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(steps: Sequence[Step], record: Record, folder: Path, total: float) -> bool:
    """All steps within `total` seconds; whether every one ended well. What they print goes to
    folder/log.txt."""
    deadline = time.monotonic() + total
    beside: dict[str, Running] = {}
    good = True
    for step in steps:
        if step.after in beside:
            good &= _join(beside.pop(step.after), record)
        why_not = _not_run(step, deadline)
        if why_not is not None:
            _tell(record, step, "not run", 0.0, why_not)
        elif step.beside:
            beside[step.name] = Running(step, folder, min(step.limit, deadline - time.monotonic()))
        else:
            good &= _run(step, record, folder, deadline)
    for running in beside.values():
        good &= _join(running, record)
    return good


def _join(running: Running, record: Record) -> bool:
    """The end of a step that ran beside others."""
    reason = running.wait(record)
    _tell(record, running.step, _state(reason), running.seconds, reason)
    return reason is None


def _run(step: Step, record: Record, folder: Path, deadline: float) -> bool:
    """One step, again after each death that cost an item."""
    started = time.monotonic()
    while True:
        left = min(step.limit - (time.monotonic() - started), deadline - time.monotonic())
        before = record.ended(step.name)
        reason = Running(step, folder, left).wait(record)
        for item in record.lost(step.name) if reason is not None else []:
            record.add(step=step.name, item=item, state="failed", reason=f"the process ended in it: {reason[:600]}")
        again = step.patience is not None and record.ended(step.name) != before
        left = min(step.limit - (time.monotonic() - started), deadline - time.monotonic())
        if reason is None or not again or left < LEAST:
            break
    _tell(record, step, _state(reason), time.monotonic() - started, reason)
    return reason is None


def _state(reason: str | None) -> str:
    return "done" if reason is None else "timeout" if OVER in reason else "failed"


def _not_run(step: Step, deadline: float) -> str | None:
    if step.needs is not None and shutil.which(step.needs) is None:
        return f"there is no {step.needs}"
    return "the time is up" if deadline - time.monotonic() < min(LEAST, step.limit) else None


def _tell(record: Record, step: Step, state: str, seconds: float, reason: str | None) -> None:
    record.add(step=step.name, state=state, seconds=round(seconds, 1), reason=reason)
    print(f"{step.name}: {state} after {seconds:.0f} s (limit {step.limit:.0f})", flush=True)
    if reason is not None:
        print("  " + reason.replace("\n", "\n  "), flush=True)


def _size(record: Record) -> int:
    return record.path.stat().st_size if record.path.exists() else 0
