"""Steps on a rented GPU, without one: steps that fail or hang, a lost CUDA context, and carried
kernels."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gpu_steps
import pytest
from gpu_kernels import NAME, adopt
from gpu_steps import Step
from triton.runtime import cache

ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT / x) for x in ("", "tools", "benchmarks")]
PATH = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])

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
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "gpu_plugin", "-n", str(processes), "-q", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, text=True)
    assert "failed: test_it.py::test_one[2]\n" in done.stdout
    assert "the CUDA context is lost: an illegal memory access was encountered\n" in done.stdout
    assert ("failed: test_it.py::test_one[4]\n" in done.stdout) == bool(processes)
    assert (" 5 passed" if processes else " 3 passed") in done.stdout.replace("\n", " "), done.stdout


@pytest.mark.nightly
def test_steps_that_fail_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes of a step that hangs are ended, too."""
    hangs = "import subprocess, time; print('here', flush=True); subprocess.run(['sleep', '77.25'])"
    planned = [
        Step("failed", 1, 20, [sys.executable, "-c", "raise SystemExit('why')"]),
        Step("hung", 1, 2, [sys.executable, "-c", hangs]),
        Step("missing", 1, 2, ["/nowhere/program"]),
        Step("second call", 2, 20, ["false"]),
        Step("last", 1, 20, ["true"]),
    ]
    monkeypatch.setattr(gpu_steps, "steps", lambda out, rehearse: planned)
    assert gpu_steps.main(["1", "--out", str(tmp_path), "--rehearse"]) == 1
    printed = (tmp_path / "call1.txt").read_text()
    assert capsys.readouterr().out == printed
    failed, hung, missing, last = printed.splitlines()
    assert re.fullmatch(r"failed: exit 1, \d s: why", failed)
    assert re.fullmatch(r"hung: at its limit, \d s: here", hung)
    assert missing.startswith("missing: not started, ")
    assert last.startswith("last: exit 0, ")
    assert "=== hung\nhere\n" in (tmp_path / "call1.log").read_text()
    assert "77.25" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert gpu_steps.main(["last", "--out", str(tmp_path), "--rehearse", "--seconds", "1"]) == 1
    assert (tmp_path / "call.txt").read_text() == "last: not run, the time is up\n"


@pytest.mark.nightly
def test_steps_are_rehearsed(tmp_path: Path) -> None:
    """Those that need no tools of a GPU."""
    env = {name: x for name, x in os.environ.items() if "XDIST" not in name} | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, str(ROOT / "tools/gpu_steps.py"), "check", "decode", "--rehearse"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--seconds", "1000"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + (tmp_path / "call.log").read_text()[-3000:]
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert {row["status"] for row in rows} == {"measured"}


def test_kernels_that_are_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "triton_key", lambda: "3.6.0a-b-c")
    assert adopt(tmp_path) == "no kernels were carried"
    for theirs in ("3.6.0a-x-y", "3.6.0a-x", "3.7.0a-x-c"):
        (tmp_path / NAME).write_text(theirs)
        assert "2 of its files differ" in adopt(tmp_path)
        assert cache.triton_key() == "3.6.0a-b-c"
    (tmp_path / NAME).write_text("3.6.0a-x-c")
    assert adopt(tmp_path) == "carried kernels are used"
    assert cache.triton_key() == "3.6.0a-x-c"


CARRY = """
import json, sys
from pathlib import Path

import triton
from triton.runtime import cache

from gpu_kernels import BENCHMARKS, NAME, adopt, compile_benchmark, listed

decode = (*BENCHMARKS[0], *listed(*BENCHMARKS[0])[0])
folder, hits = Path("kit/triton"), []
if sys.argv[1] == "fill":
    key = cache.triton_key() + "of another Python"
    folder.mkdir(parents=True)
    (folder / NAME).write_text(key)
adopt(folder)
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
compile_benchmark(*decode)
print(json.dumps(hits))
"""


@pytest.mark.nightly
def test_carried_kernels_are_found(tmp_path: Path) -> None:
    """Kernels that were compiled in one tree are not compiled again in another."""

    def hits(what: str, tree: Path, folder: object) -> list[bool]:
        env = os.environ | {"PYTHONPATH": PATH, "TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
        command = [sys.executable, "-c", CARRY, what]
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=True)
        found: list[bool] = json.loads(done.stdout.splitlines()[-1])
        return found

    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    made = hits("fill", here, "kit/triton")
    assert made.count(False) >= 2
    here.rename(there)
    assert set(hits("look", there, there / "kit/triton")) == {True}
