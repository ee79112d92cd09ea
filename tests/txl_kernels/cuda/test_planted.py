"""Faults that the SIMT emulation detects: each barrier left out, wrong shuffles, wrong
terms."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_emulation import CSRC, HERE, build_driver
from planted_faults import BACKWARD, DECODE, FORWARD, OF_VARIANT, Edit, copied_source, marks, plant

NO_DRIVER = "CUDA driver version is insufficient for CUDA runtime version\n"
THREADS = ("-DSIMT_THREADS", "-pthread", "-g", "-fsanitize=thread")
BARRIER = "  barrier();"
BARRIERS = [
    (name, n)
    for name in ("decode/part", "decode/values", "merge")
    for n in range((CSRC / f"{name}.cuh").read_text().count(BARRIER))
]


def test_every_mark_has_a_fault(tmp_path: Path) -> None:
    of_variants = [fault for faults in OF_VARIANT.values() for fault in faults]
    faults = [(fault.name, fault.edit) for fault in FORWARD + BACKWARD + of_variants]
    faults += [(name, edit) for name, edit, _ in DECODE]
    assert sorted(name for _, _, name in marks()) == sorted(name for name, _ in faults)
    for name, edit in faults:
        planted = plant(tmp_path / name, name, edit)
        changed = [x for x in planted.rglob("*.*") if x.read_text() != (CSRC / x.relative_to(planted)).read_text()]
        assert len(changed) == 1, name


def without_barrier(folder: Path, name: str, which: int) -> Path:
    """csrc/cuda of a copy of csrc without one barrier of a file."""
    csrc = copied_source(folder)
    source = csrc / f"{name}.cuh"
    parts = source.read_text().split(BARRIER)
    source.write_text(BARRIER.join(parts[: which + 1]) + "  ;" + BARRIER.join(parts[which + 1 :]))
    return csrc


def run(program: Path, **settings: str) -> str:
    """Return what the program prints: its result, or an error of the emulation or
    ThreadSanitizer."""
    done = subprocess.run([program], capture_output=True, text=True, env=os.environ | settings, timeout=300)
    return done.stdout + done.stderr


def test_kernels_in_any_order_of_threads(tmp_path: Path) -> None:
    program = build_driver(tmp_path)
    assert [run(program, SIMT_ORDER=order) for order in ("forward", "reversed")] == ["right\n"] * 2


@pytest.mark.slow
def test_thread_sanitizer_finds_no_race(tmp_path: Path) -> None:
    assert run(build_driver(tmp_path, flags=THREADS)) == "right\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_driver_runs_on_a_gpu(tmp_path: Path) -> None:
    """Without one it builds and reports that; on one it can run under compute-sanitizer."""
    program = tmp_path / "driver"
    sources = [HERE / "driver.cpp", CSRC / "decode" / "decode_launch.cu"]
    subprocess.run(["nvcc", "-std=c++17", "-arch=sm_80", "-I", CSRC, "-x", "cu", *sources, "-o", program], check=True)
    assert run(program) in ("right\n", "no CUDA-capable device is detected\n", NO_DRIVER)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), BARRIERS)
def test_missing_barrier_is_a_race(tmp_path: Path, name: str, which: int) -> None:
    csrc = without_barrier(tmp_path, name, which)
    assert "ThreadSanitizer: data race" in run(build_driver(tmp_path, csrc, THREADS))


# Without the third, the largest score of a part may lack positions, which changes no result.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), [barrier for barrier in BARRIERS if barrier != ("decode/part", 2)])
def test_missing_barrier_gives_wrong_values(tmp_path: Path, name: str, which: int) -> None:
    program = build_driver(tmp_path, without_barrier(tmp_path, name, which))
    assert "wrong\n" in [run(program, SIMT_ORDER=order) for order in ("forward", "reversed")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "edit", "seen"), DECODE)
def test_fault_of_decode_is_detected(tmp_path: Path, name: str, edit: Edit, seen: str) -> None:
    assert seen in run(build_driver(tmp_path, plant(tmp_path, name, edit)))
