"""Steps on a rented GPU, without one: steps that fail or hang, a lost CUDA context, builds in
turns."""

import re
import subprocess
import sys
from pathlib import Path

import gpu_steps
import gpu_variants
import pytest
from gpu_steps import Step

CONFTEST = """
import torch

broken = False

def synchronize():
    if broken:
        raise RuntimeError("an illegal memory access was encountered")

torch.cuda.is_available = lambda: True
torch.cuda.synchronize = synchronize
"""
TESTS = """
import pytest
import conftest

@pytest.mark.parametrize("n", range(6))
def test_one(n):
    assert not conftest.broken
    conftest.broken = n == 2
    assert n != 4
"""


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 0])
def test_lost_context_costs_one_test(tmp_path: Path, processes: int) -> None:
    """The context ends the run if there is no worker process, which is replaced."""
    for name, text in (("pytest.ini", "[pytest]\n"), ("conftest.py", CONFTEST), ("test_it.py", TESTS)):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "gpu_plugin", "-n", str(processes), "-q", str(tmp_path)]
    env = gpu_steps.environment(Step("lost", "1", 9, ()), rehearse=True)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "failed: test_it.py::test_one[2]\n" in done.stdout
    assert "the CUDA context is lost: an illegal memory access was encountered\n" in done.stdout
    assert ("failed: test_it.py::test_one[4]\n" in done.stdout) == bool(processes)
    assert (" 5 passed" if processes else " 3 passed") in done.stdout.replace("\n", " "), done.stdout


@pytest.mark.nightly
def test_steps_that_fail_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Output is seen at once; processes of a step that hangs are ended, too."""
    hangs = "import subprocess; print('here', flush=True); subprocess.run(['sleep', '77.25'])"
    planned = [
        Step("failed", "1", 20, [sys.executable, "-c", "raise SystemExit('why')"]),
        Step("hung", "1", 2, [sys.executable, "-c", hangs]),
        Step("missing", "1", 2, ["/nowhere/program"]),
        Step("second call", "2", 20, ["false"]),
    ]
    monkeypatch.setattr(gpu_steps, "steps", lambda out, rehearse: planned)
    assert gpu_steps.main(["1", "--out", str(tmp_path), "--rehearse"]) == 1
    assert gpu_steps.main(["failed", "--out", str(tmp_path), "--rehearse", "--seconds", "1"]) == 1
    printed = capfdbinary.readouterr().out.decode()
    assert re.sub(r"\d+ s\n|logged: .*\n", "", printed) == (
        "why\n=== failed: exit 1, here\n=== hung: at its limit, === missing: exit 127, "
        "=== failed: not run, the time is up\n"
    )
    assert (tmp_path / "hung.log").read_text() == "here\n"
    assert "77.25" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_calls_take_ten_minutes() -> None:
    known = gpu_steps.steps(Path(), rehearse=False)
    assert {call: sum(x.seconds for x in known if x.call == call) for call in gpu_steps.CALLS} == gpu_steps.CALLS
    assert sum(gpu_steps.CALLS.values()) == 600 >= 2.5 * max(gpu_steps.CALLS.values())


@pytest.mark.parametrize("wrong", [False, True])
def test_builds_in_turns(wrong: bool) -> None:
    factors = {"default": 1.0, "other": 1.1 if wrong else 1.0}
    calls = {name: lambda x, factor=factor: factor * gpu_variants.ours(x, "native") for name, factor in factors.items()}
    line = gpu_variants.compare(gpu_variants.TINY[0], True, dict.fromkeys(calls, gpu_variants.cuda.native), calls)
    assert re.match(r"both \(1, 2, 5, 3, 8, False\): default \d+\.\d \[\d+\.\d\], other ", line)
    assert ("other: WRONG by 0.1" in line) == wrong
