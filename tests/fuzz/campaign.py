"""Tries inputs made from seeds in child processes, and says which crashed, hung, or were wrong.

python tests/fuzz/campaign.py arguments --minutes 60     # new seeds each time
python tests/fuzz/campaign.py arguments --only 1234      # one input, in this process
"""

import argparse
import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
# Each is a module fuzz_<name> with `prepare(folder)`, called once, and `attempt(random, folder)`,
# which raises for a finding.
FUZZERS = ("arguments", "options", "files", "kills")
MEMORY = 16 * 2**30  # bytes of address space: what asks for more gets an error, not the machine


@dataclass
class Outcome:
    """What became of the inputs of one fuzzer."""

    name: str
    tried: int = 0
    seconds: float = 0
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        return self.crashes + self.hangs + self.wrong

    def __str__(self) -> str:
        counts = f"{len(self.crashes)} crashes, {len(self.hangs)} hangs, {len(self.wrong)} wrong"
        return f"{self.name}: {self.tried} inputs in {self.seconds:.0f} s, {counts}"


def campaign(name: str, first: int, count: int, seconds: float = float("inf"), hang: float = 120) -> Outcome:
    """Tries seeds from `first` on, until `count` were tried or `seconds` are over; `hang` seconds
    each at most."""
    outcome, began = Outcome(name), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="txl-fuzz-") as folder:
        seed = first
        while seed < first + count and time.monotonic() - began < seconds:
            left = min(seconds - (time.monotonic() - began), 10**6)
            seed = _child(outcome, Path(folder), seed, first + count, left, hang)
    outcome.tried, outcome.seconds = seed - first, time.monotonic() - began
    return outcome


def _child(outcome: Outcome, folder: Path, seed: int, end: int, seconds: float, hang: float) -> int:
    """One process, until it is done, dies or hangs; the seed to go on with."""
    progress = folder / "progress"  # a line for each seed begun, a JSON line for each finding
    progress.write_text("")
    command = [sys.executable, __file__, outcome.name, "--child", folder, seed, end, seconds]
    with open(folder / "errors", "w+b") as errors:
        child = subprocess.Popen(list(map(str, command)), stderr=errors, cwd=folder, start_new_session=True)
        hung, size, since = False, 0, time.monotonic()
        while child.poll() is None:
            time.sleep(0.05)
            if progress.stat().st_size != size:
                size, since = progress.stat().st_size, time.monotonic()
            if time.monotonic() - since > hang:
                hung = True
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it started
        child.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-2000:]
    lines = progress.read_text().splitlines()
    begun = [int(line) for line in lines if not line.startswith("{")]
    outcome.wrong += [_finding(outcome.name, **json.loads(line)) for line in lines if line.startswith("{")]
    if not begun:
        raise RuntimeError(f"the {outcome.name} fuzzer did not start:\n{said}")
    last = begun[-1]
    if hung:
        outcome.hangs.append(_finding(outcome.name, last, f"hung for {hang} s"))
    elif child.returncode != 0:
        outcome.crashes.append(_finding(outcome.name, last, f"ended with {child.returncode}\n{said}"))
    return last + 1


def _finding(name: str, seed: int, text: str) -> str:
    return f"python tests/fuzz/campaign.py {name} --only {seed}\n{text}"


def _attempts(name: str, folder: Path, first: int, end: int, seconds: float) -> None:
    """In the child: says what it tries before it tries it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fuzzer, until = importlib.import_module(f"fuzz_{name}"), time.monotonic() + seconds
    with open(folder / "progress", "a", buffering=1) as progress:
        for seed in range(first, end):
            print(seed, file=progress)
            if seed == first:
                fuzzer.prepare(folder / "prepared")
            try:
                fuzzer.attempt(Random(seed), folder / "prepared")
            except Exception:  # SystemExit and the like end the child, which is a crash
                print(json.dumps({"seed": seed, "text": traceback.format_exc()[-3000:]}), file=progress)
            if time.monotonic() > until:
                break


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help=", ".join(FUZZERS))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=int(time.time()), help="the first seed")
    parser.add_argument("--only", type=int, help="one seed, in this process")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        folder, first, end, seconds = options.child
        _attempts(options.name, Path(folder), int(first), int(end), float(seconds))
        return 0
    if options.only is not None:
        fuzzer = importlib.import_module(f"fuzz_{options.name}")
        with tempfile.TemporaryDirectory() as folder:
            fuzzer.prepare(Path(folder))
            fuzzer.attempt(Random(options.only), Path(folder))
        return 0
    outcome = campaign(options.name, options.first, 10**9, options.minutes * 60)
    print(*outcome.findings, outcome, sep="\n\n")
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]
    sys.exit(main())
