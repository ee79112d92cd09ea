"""Steps on a rented GPU, without one: steps that end as they should not, a CUDA context that is
lost, and carried kernels that are found."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_figures
import gpu_steps
import pytest
from gpu_card import architecture, covers, misfit
from gpu_kernels import NAME, adopt
from gpu_steps import Step
from triton.runtime import cache

from txl_kernels.backends import cuda
from txl_kernels.backends.native_modules import NativeModule

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])])

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


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 0])
def test_a_lost_context_costs_one_test(tmp_path: Path, processes: int) -> None:
    """Without processes to replace it ends the run."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "gpu_plugin", "-n", str(processes), "-q", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, text=True)
    assert "failed: test_it.py::test_one[2]\n" in done.stdout
    assert "the CUDA context is lost: an illegal memory access was encountered\n" in done.stdout
    assert ("failed: test_it.py::test_one[4]\n" in done.stdout) == bool(processes)
    assert (" 5 passed" if processes else " 3 passed") in done.stdout.replace("\n", " "), done.stdout


@pytest.mark.slow
def test_a_step_that_fails_or_hangs_leaves_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it started is ended, too."""
    hangs = "import subprocess, time; print('here', flush=True); subprocess.run(['sleep', '77.25'])"
    planned = [
        Step("failed", 1, 20, [sys.executable, "-c", "raise SystemExit('why')"]),
        Step("hung", 1, 2, [sys.executable, "-c", hangs]),
        Step("missing", 1, 2, ["/nowhere/program"]),
        Step("of the other call", 2, 20, ["false"]),
        Step("last", 1, 20, ["true"]),
    ]
    monkeypatch.setattr(gpu_steps, "steps", lambda where: planned)
    assert gpu_steps.main(["1", "--out", str(tmp_path), "--rehearse"]) == 1
    told = (tmp_path / "call1.txt").read_text()
    assert capsys.readouterr().out == told
    failed, hung, missing, last = told.splitlines()
    assert re.fullmatch(r"failed: exit 1, \d s: why", failed)
    assert re.fullmatch(r"hung: at its limit, \d s: here", hung)
    assert missing.startswith("missing: not started, ")
    assert last.startswith("last: exit 0, ")
    assert "=== hung\nhere\n" in (tmp_path / "call1.log").read_text()
    assert "77.25" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert gpu_steps.main(["last", "--out", str(tmp_path), "--rehearse", "--seconds", "1"]) == 1
    assert (tmp_path / "call.txt").read_text() == "last: not run, the time is up\n"


@pytest.mark.slow
def test_figures_are_rehearsed(tmp_path: Path) -> None:
    """Each step that needs no other library; two variants, which the emulation runs."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    names = ["variants", "queries", "inkling", "flex"]
    command = [sys.executable, str(ROOT / "tools/gpu_steps.py"), *names, "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--seconds", "1000"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + (tmp_path / "call.log").read_text()[-3000:]
    found = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert not [x for x in found if "error" in x]
    assert {x["variant"] for x in found if x.get("right")} == {"today", "A"}
    assert {x["way"] for x in found if x["step"] == "queries"} >= {"decode", "prefill", "triton"}


def test_a_figure_that_raises_leaves_its_error(tmp_path: Path) -> None:
    session = gpu_figures.Session("some", tmp_path / "figures.jsonl", 0.0, rehearse=True)
    with session.attempt(way="a"):
        raise ValueError("why")
    assert session.failed
    assert session.is_over(way="b")
    found = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert found == [
        {"step": "some", "way": "a", "error": "ValueError: why"},
        {"step": "some", "way": "b", "error": "not reached, the time is up"},
    ]


def test_metrics_of_nsight_compute() -> None:
    """Its table has other lines around it, and a line of units below its head."""
    told = """==PROF== Connected to process 7
"ID","Kernel Name","smsp__inst_executed.sum","device__attribute_x"
"","","inst",""
"0","void forward_kernel<S>(P)","12,345","1"
==PROF== Disconnected from process 7
"""
    assert gpu_figures.metrics_in(told) == [("void forward_kernel<S>(P)", {"smsp__inst_executed.sum": "12,345"})]


def test_whose_kernels_can_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

from gpu_kernels import NAME, Work, adopt, compile_one

works = [Work(2, 3, 200, 300, 64), Work(1, 8, 1, 700, 64, backward=False)]
folder, hits = Path("kit/triton"), []
if sys.argv[1] == "fill":
    key = cache.triton_key() + "of another Python"
    folder.mkdir(parents=True)
    (folder / NAME).write_text(key)
adopt(folder)
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
assert [compile_one(work) for work in works] == [None, None]
print(json.dumps(hits))
"""


@pytest.mark.slow
def test_carried_kernels_are_found(tmp_path: Path) -> None:
    """Compiled in one tree; in another nothing is compiled again."""

    def hits(what: str, tree: Path, folder: object) -> list[bool]:
        env = os.environ | {"PYTHONPATH": PATH, "TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
        command = [sys.executable, "-c", CARRY, what]
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=True)
        found: list[bool] = json.loads(done.stdout.splitlines()[-1])
        return found

    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    made = hits("fill", here, "kit/triton")
    assert made.count(False) >= 4
    here.rename(there)
    assert set(hits("look", there, there / "kit/triton")) == {True}


def test_what_a_module_runs_on() -> None:
    assert [architecture(x) for x in ((8, 0), (9, 0), (10, 0), (12, 0))] == [
        "80-real",
        "90a-real",
        "100-real",
        "120-real",
    ]
    every = "80-real 90a-real 100 120-real"
    assert all(covers(every, x) for x in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)))
    assert not covers(every, (7, 5))
    assert [covers("90a-real", x) for x in ((9, 0), (8, 0), (10, 0))] == [True, False, False]
    assert [covers("86-real", x) for x in ((8, 0), (8, 6), (8, 9), (9, 0))] == [False, True, True, False]
    assert [covers("100", x) for x in ((9, 0), (10, 0), (12, 0))] == [False, True, True]
    assert [covers("80-virtual", x) for x in ((7, 5), (8, 0), (12, 0))] == [False, True, True]


def test_a_module_for_another_gpu_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(clock_limit=7, architectures="90a-real")
    monkeypatch.setattr(cuda, "native", NativeModule(module))
    assert misfit(7, (9, 0)) is None
    assert misfit(0, (9, 0)) == "the module ends waits after 7 clocks, 0 are wanted"
    assert misfit(7, (8, 0)) == "the module is for 90a-real, this GPU is 80-real"
    monkeypatch.setattr(cuda, "native", NativeModule(why_not_loaded="it is not here"))
    assert misfit(7, (9, 0)) == "it is not here"
