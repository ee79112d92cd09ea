"""Comparison with another version of the packages: pytest benchmarks/ --base=REVISION.

Each implementation of this package is compared with itself in the other version. Each version runs
in a worker process (python -m harness.base), which makes the benchmark's own entry, checks it, and
times it by the benchmark's own clock. The two run in turns. The ratio of the two times is taken
round by round, so that a machine that slows down for a while slows both; the interval is a 95%
bootstrap interval of the median ratio. A case has regressed if its median ratio is above 1.10 and
its interval holds no 1.00.

Workers run the benchmarks' present code, so those that use the packages' public interface alone run
with any version.
"""

import contextlib
import functools
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from harness.comparison import Comparison, Entry, Implementation, Unavailable
from harness.machine import Machine

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
MAX_RATIO = 1.10
MIN_ROUNDS = 11
BASE = ", base"  # ends the name of an implementation in the other version


class Verdict(NamedTuple):
    """The median of this version's time over the other's, and its 95% interval."""

    ratio: float
    low: float
    high: float

    @property
    def regressed(self) -> bool:
        return self.ratio > MAX_RATIO and self.low > 1.0

    def __str__(self) -> str:
        return f"{self.ratio:.3f} times the base's time [{self.low:.3f}, {self.high:.3f}]"


def judge(base: list[float], head: list[float]) -> Verdict:
    """Return the verdict from times in seconds; base[i] and head[i] are from the same round."""
    ratios = [b / a for a, b in zip(base, head, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return Verdict(statistics.median(ratios), medians[25], medians[974])


class Versions:
    """Workers of the packages here and of those of a revision, or in a folder.

    Raises:
        RuntimeError: the revision cannot be built.
    """

    def __init__(self, base: str, machine: Machine, full: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        is_folder = (Path(base) / "txl_kernels").is_dir()
        site = Path(base).resolve() if is_folder else self._built(base, cuda=machine.kind == "cuda")
        self._workers = {"": Worker(ROOT, machine, full), BASE: Worker(site, machine, full, Unavailable)}

    def _built(self, revision: str, cuda: bool) -> Path:
        tree, site = Path(self._folder.name, "tree"), Path(self._folder.name, "site")
        kernels = {"TXL_KERNELS_CUDA": "auto" if cuda else "off"}  # which take minutes to compile
        _run("git", "-C", ROOT, "worktree", "add", "--detach", "--quiet", tree, revision)
        try:
            _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, tree, **kernels)
        finally:
            _run("git", "-C", ROOT, "worktree", "remove", "--force", tree)
        return site

    def pairs(self, module: str, function: str, found: list[Comparison]) -> list[Comparison]:
        """Return a comparison of both versions for each of this package's implementations.

        module, function: names of the benchmark that lists the comparisons `found`.
        """
        pairs = []
        for comparison in found:
            if comparison.clock == "own":  # measures memory in a process of its own
                continue
            rounds = max(comparison.minimum, MIN_ROUNDS), comparison.maximum
            for name in (x.name for x in comparison.implementations if x.role == "ours"):
                request = [module, function, comparison.title, name]
                both = [
                    Implementation(name + suffix, functools.partial(worker.entry, request), "ours")
                    for suffix, worker in self._workers.items()
                ]
                group = f"{name}: {comparison.group}"
                pairs.append(Comparison(group, comparison.case, both, "own", comparison.seconds, *rounds, paired=True))
        return pairs

    def close(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
            worker.process.wait()
        self._folder.cleanup()


def _run(*command: str | Path, **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr.strip()[-2000:]}")


class Worker:
    """A process that uses the packages in a folder. failure: what is raised if these cannot run an
    implementation."""

    def __init__(self, site: Path, machine: Machine, full: bool, failure: type[Exception] = RuntimeError) -> None:
        path = os.pathsep.join([str(site), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "harness.base", site, machine.kind, str(machine.brief), str(full)]
        self.site, self.failure, environment = site, failure, os.environ | {"PYTHONPATH": path}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def entry(self, request: list[str]) -> Entry:
        """Make an entry that asks for the times of one in the worker.

        request: names of the module and the function, the comparison's title, and the
            implementation's name.
        """
        return Entry(lambda: self._ask("time", request), per=self._ask("per", request), warm_up=False)

    def _ask(self, what: str, request: list[str]) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        time.sleep(0.005)  # lets the other process's threads stop spinning
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([what, *request]), file=self.process.stdin, flush=True)
        value, error = json.loads(self.process.stdout.readline() or '[0, "the process ended"]')
        if error:
            failure = Unavailable if error.startswith(Unavailable.__name__) else self.failure
            raise failure(f"{self.site}: {error}")
        return float(value)


def serve(machine: Machine, full: bool) -> None:
    """Answer requests with [value, error]: for "per" the number of units in a run, for "time"
    seconds."""
    answers, sys.stdout = sys.stdout, sys.stderr
    made = functools.lru_cache(1)(functools.partial(make, machine, full))
    for line in sys.stdin:
        what, *request = json.loads(line)
        value, error = 0.0, ""
        try:
            per, clock = made(*request)
            value = per if what == "per" else clock()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps([value, error]), file=answers, flush=True)


def make(
    machine: Machine, full: bool, module: str, function: str, title: str, name: str
) -> tuple[float, Callable[[], float]]:
    """Return the number of units in a run, and a function that runs and returns seconds."""
    machine.free_memory()
    listed = getattr(importlib.import_module(module), function).comparisons(machine, full)
    found = [(c, x) for c in listed if c.title == title for x in c.implementations if x.name == name]
    if not found:
        raise Unavailable(f"{title} has no {name} here: its backend is not available, or the version lacks it")
    comparison, implementation = found[0]
    entry = implementation.prepare()
    if entry.check is not None:
        entry.check()
    clock = machine.clock(comparison.clock, entry.run)
    if entry.warm_up and not machine.brief:
        clock()
    return entry.per, clock


if __name__ == "__main__":
    import txl
    import txl_kernels

    site, kind, brief, full = sys.argv[1:]
    for package in (txl, txl_kernels):
        if not Path(package.__path__[0]).resolve().is_relative_to(Path(site).resolve()):
            sys.exit(f"{package.__path__[0]} was imported instead of the package in {site}")
    serve(Machine(kind, brief == "True"), full == "True")
