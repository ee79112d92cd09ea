"""Is this working tree slower than another revision on the CPU? Both are built, and run in turns,
case by case.

    make bench-compare BASE=REVISION, or PYTHONPATH=benchmarks python -m compare REVISION

Each round times a case once on both sides. The ratio of the two times is taken round by round, so
that a machine that slows down for a while slows both; the interval is a 95% bootstrap interval of
the median ratio. A case has regressed if its median ratio is above 1.10 and its interval holds no
1.00. Exit status 1: some case has regressed; 2: could not compare.
"""

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compare.worker import CASES

ROOT = Path(__file__).parents[2]
MAX_RATIO = 1.10


class Failed(Exception):
    """One of the two revisions cannot be built or run."""


class Refused(Exception):
    """One of the two revisions cannot run a case."""


@dataclass(frozen=True)
class Verdict:
    """The result for one case: median of head's time over base's, its 95% interval, and both median
    times in seconds."""

    case: str
    ratio: float
    low: float
    high: float
    base_ms: float
    head_ms: float

    @property
    def regressed(self) -> bool:
        return self.ratio > MAX_RATIO and self.low > 1.0


def judge(case: str, base: list[float], head: list[float]) -> Verdict:
    """Compute the verdict from times in seconds; base[i] and head[i] are from the same round."""
    ratios = [b / a for a, b in zip(base, head, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    times = statistics.median(base) * 1e3, statistics.median(head) * 1e3
    return Verdict(case, statistics.median(ratios), medians[25], medians[974], *times)


class Side:
    """A worker process that uses the packages in the folder `site`."""

    def __init__(self, site: Path) -> None:
        self.site = site
        worker, found = Path(__file__).with_name("worker.py"), os.environ | {"PYTHONPATH": str(site)}
        self.process = subprocess.Popen(
            [sys.executable, worker, site], env=found, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def seconds(self, case: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{self.site}: the process ended at {case}")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(f"{self.site}: {answer['error']}")
        return float(answer["seconds"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(base: Side, head: Side, case: str, seconds: float) -> Verdict:
    """Time a case alternately on both sides, for at least 11 rounds and `seconds` seconds."""
    times: dict[Side, list[float]] = {base: [], head: []}
    end = time.monotonic() + seconds
    while len(times[head]) < 11 or (time.monotonic() < end and len(times[head]) < 300):
        for side in (base, head) if len(times[head]) % 2 else (head, base):
            time.sleep(0.005)  # lets the other process's threads stop spinning
            times[side].append(side.seconds(case))
    return judge(case, times[base], times[head])


@contextlib.contextmanager
def built(revision: str) -> Iterator[tuple[Path, Path]]:
    """A context with two folders: the packages of the revision and of the working tree, both built
    now."""
    with tempfile.TemporaryDirectory() as folder:
        tree, sites = Path(folder, "tree"), (Path(folder, "base"), Path(folder, "head"))
        _command(["git", "-C", str(ROOT), "worktree", "add", "--detach", "--quiet", str(tree), revision])
        try:
            for source, site in zip((tree, ROOT), sites, strict=True):
                print(f"building {source}", flush=True)
                _command(
                    [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(source)]
                )
            yield sites
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], capture_output=True)


def _command(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}\n{done.stderr.strip()[-2000:]}")


def compare(base_site: Path, head_site: Path, only: str, seconds: float) -> bool:
    """Print a line for each case; return whether none has regressed."""
    names = [name for name in CASES if re.search(only, name)]
    if not names:
        raise Failed(f"no case matches {only!r}; there are: {', '.join(CASES)}")
    verdicts = []
    with contextlib.closing(Side(base_site)) as base, contextlib.closing(Side(head_site)) as head:
        print(f"{'case':<52}{'base ms':>10}{'head ms':>10}{'head/base':>11}   95% interval")
        for name in names:
            try:
                v = measure(base, head, name, seconds)
            except Refused as error:  # an older base may not have what a case uses
                print(f"{name:<52}not compared: {error}")
                continue
            verdicts.append(v)
            line = f"{name:<52}{v.base_ms:>10.3f}{v.head_ms:>10.3f}{v.ratio:>11.3f}   [{v.low:.3f}, {v.high:.3f}]"
            print(line + ("  SLOWER" if v.regressed else ""), flush=True)
    if not verdicts:
        raise Failed("no case runs on both sides")
    return not any(v.regressed for v in verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="what to compare the working tree with")
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each case")
    a = parser.parse_args()
    try:
        with built(a.revision) as sites:
            good = compare(*sites, a.only, a.seconds)
    except (Failed, OSError, ValueError) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if good else "slower than the base by more than 10%")


if __name__ == "__main__":
    main()
