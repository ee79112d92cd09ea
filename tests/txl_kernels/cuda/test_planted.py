"""What the SIMT emulation notices: barriers taken out one by one, and wrong shuffles."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_emulation import CSRC, HERE, build_driver

NO_DRIVER = "CUDA driver version is insufficient for CUDA runtime version\n"
THREADS = ("-DSIMT_THREADS", "-pthread", "-g", "-fsanitize=thread")
BARRIER = "  barrier();"
BARRIERS = [
    (name, n) for name in ("part", "values", "merge") for n in range((CSRC / f"{name}.cuh").read_text().count(BARRIER))
]
SHUFFLES = [
    # Too few steps, half of the values lost, wrong partners; then lanes that differ, and one that
    # stays away.
    ("rows", "step = LANES / 8;", "step = LANES / 16;", "wrong"),
    ("rows", "sent = upper ? x[k] : x[k + 2]", "sent = x[k]", "wrong"),
    ("rows", "shuffle_xor(sent, LANES / 4)", "shuffle_xor(sent, LANES / 2)", "wrong"),
    ("values", "step = S::LANES; step < WARP", "step = 2 * S::LANES; step < WARP", "wrong"),
    ("scores", "sum += shuffle_xor(sum, step)", "sum += shuffle_xor(sum, 1)", "wrong"),
    ("merge", "sum += shuffle_xor(sum, step)", "sum = shuffle_xor(sum, step)", "wrong"),
    ("rows", "shuffle_xor(sent, LANES / 2)", "shuffle_xor(sent, thread() % 2 ? LANES / 2 : 1)", "shuffle differently"),
    (
        "rows",
        "if (lane<S>() % SHARE",
        "if (lane<S>() && shuffle_xor(0, 1) == 0 && lane<S>() % SHARE",
        "shuffle differently",
    ),
    ("part", BARRIER, "  if (thread() != 1) barrier();", "do not reach"),
]


def plant(folder: Path, name: str, old: str, new: str, which: int = 0) -> Path:
    """csrc/cuda of a copy of csrc in which one occurrence of `old` is replaced."""
    shutil.copytree(CSRC.parent, folder / "csrc")
    csrc = folder / "csrc" / CSRC.name
    source = csrc / f"{name}.cuh"
    parts = source.read_text().split(old)
    assert len(parts) > which + 1
    source.write_text(old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :]))
    return csrc


def run(program: Path, **settings: str) -> str:
    """What it printed: its verdict, or why the emulation or ThreadSanitizer ended it."""
    done = subprocess.run([program], capture_output=True, text=True, env=os.environ | settings, timeout=300)
    return done.stdout + done.stderr


def test_the_kernels_are_right_in_any_order_of_threads(tmp_path: Path) -> None:
    program = build_driver(tmp_path)
    assert [run(program, SIMT_ORDER=order) for order in ("forward", "reversed")] == ["right\n"] * 2


@pytest.mark.slow
def test_thread_sanitizer_finds_no_race(tmp_path: Path) -> None:
    assert run(build_driver(tmp_path, flags=THREADS)) == "right\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_same_program_runs_on_a_gpu(tmp_path: Path) -> None:
    """Without one it builds, and says what is missing; with one, tools/gpu_check.sh runs it under
    compute-sanitizer."""
    program = tmp_path / "driver"
    sources = [HERE / "driver.cpp", CSRC / "launch.cu"]
    subprocess.run(["nvcc", "-std=c++17", "-arch=sm_80", "-I", CSRC, "-x", "cu", *sources, "-o", program], check=True)
    assert run(program) in ("right\n", "no CUDA-capable device is detected\n", NO_DRIVER)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), BARRIERS)
def test_a_missing_barrier_is_a_race(tmp_path: Path, name: str, which: int) -> None:
    csrc = plant(tmp_path, name, BARRIER, "  ;", which)
    assert "ThreadSanitizer: data race" in run(build_driver(tmp_path, csrc, THREADS))


# Without the third, positions may come after the part's largest score is taken; only that, not a
# weight's share, is off.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), [barrier for barrier in BARRIERS if barrier != ("part", 2)])
def test_a_missing_barrier_gives_wrong_values(tmp_path: Path, name: str, which: int) -> None:
    program = build_driver(tmp_path, plant(tmp_path, name, BARRIER, "  ;", which))
    assert "wrong\n" in [run(program, SIMT_ORDER=order) for order in ("forward", "reversed")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "old", "new", "seen"), SHUFFLES)
def test_a_wrong_shuffle_is_noticed(tmp_path: Path, name: str, old: str, new: str, seen: str) -> None:
    assert seen in run(build_driver(tmp_path, plant(tmp_path, name, old, new)))
