"""`make bench-compare`: finds a slow-down of 15%, and none where there is none."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import txl
import txl_kernels
from compare.__main__ import judge

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def noisy(seconds: float, count: int, seed: int) -> list[float]:
    """Times of a shared machine: 5% of noise, and now and then a hiccup."""
    draw = random.Random(seed)
    return [seconds * draw.uniform(1, 1.05) * (3 if draw.random() < 0.1 else 1) for _ in range(count)]


@pytest.mark.parametrize(
    ("slower", "regressed"), [(0.8, False), (1.0, False), (1.05, False), (1.15, True), (2.0, True)]
)
def test_verdict(slower: float, regressed: bool) -> None:
    for seed in range(10):
        verdict = judge("a case", noisy(1.0, 40, seed), noisy(slower, 40, seed + 100))
        assert verdict.regressed == regressed
        assert verdict.low <= verdict.ratio <= verdict.high


def test_noise_alone_does_not_fail() -> None:
    """Few rounds whose median happens to be high, in an interval that reaches below one."""
    base, head = [1.0] * 11, [0.7, 0.8, 0.9, 0.95, 0.98, 1.12, 1.2, 1.3, 1.4, 1.5, 1.6]
    verdict = judge("a case", base, head)
    assert verdict.ratio > 1.1
    assert not verdict.regressed


SLOWED = """
import importlib.util, sys, time
where = {real!r}
spec = importlib.util.spec_from_file_location(__name__, where + "/__init__.py", submodule_search_locations=[where])
module = importlib.util.module_from_spec(spec)
sys.modules[__name__] = module
spec.loader.exec_module(module)
module.__path__.insert(0, {here!r})
right = module.rel_attention

def rel_attention(*arguments, **options):
    result = right(*arguments, **options)
    begin = time.perf_counter()  # added to the call, however long a busy machine makes it
    while time.perf_counter() - begin < 0.05:
        pass
    return result

module.rel_attention = rel_attention
"""


def site(folder: Path, slowed: bool) -> Path:
    """A folder with both packages, the real ones or one slowed down."""
    folder.mkdir()
    for package in (txl, txl_kernels):
        real, here = package.__path__[0], folder / package.__name__
        if slowed and package is txl_kernels:
            here.mkdir()
            (here / "__init__.py").write_text(SLOWED.format(real=real, here=str(here)))
        else:
            here.mkdir()
            for entry in Path(real).iterdir():
                (here / entry.name).symlink_to(entry)
    return folder


def run(base: Path, head: Path) -> subprocess.CompletedProcess[str]:
    return compare("--only", "forward, B1 H8 L512", "--seconds", "1", "--sites", str(base), str(head))


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As `make bench-compare` calls it."""
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "compare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})


def test_end_to_end(tmp_path: Path) -> None:
    real, slow = site(tmp_path / "real", False), site(tmp_path / "slow", True)
    done = run(real, slow)
    assert done.returncode == 1, done
    assert "SLOWER" in done.stdout


def test_says_why_it_cannot_compare(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run(tmp_path / "empty", tmp_path / "empty")
    assert done.returncode == 2
    assert "cannot compare" in done.stderr
    done = compare("no-such-revision")
    assert done.returncode == 2
    assert "no-such-revision" in done.stderr
