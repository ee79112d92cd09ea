"""The steps of the three calls, most informative first; each call ends within its seconds."""

import json
import os
import sys
from pathlib import Path

from gpu_kit import counters, places, rates
from gpu_kit.records import Record
from gpu_kit.steps import Step, run_all

SECONDS = 520  # of a call, beyond which nothing is started and everything is killed
GROUPS = ("attention", "evaluation", "memory", "training", "options", "calls")  # tiles have a call of their own
SANITIZED = ["tests/txl_kernels/api/test_values.py", "-k", "matches_the_definition and (41 or episodes or block)"]

MODELS = ["tests/txl/evaluation/test_decoding_device.py", "tests/txl/training/test_host_memory.py"]


def run(number: int, folder: Path, interpreter: bool) -> bool:
    """All steps of a call; whether all ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder / f"call{number}.jsonl")
    record.path.unlink(missing_ok=True)
    if places.ABOUT.exists():  # a working tree may travel without its history
        os.environ.setdefault("BENCHMARK_COMMIT", json.loads(places.ABOUT.read_text())["commit"])
    steps = {1: first, 2: second, 3: third}[number](record, interpreter)
    return run_all(steps, record, folder, float(os.environ.get("SECONDS_TOTAL", SECONDS)))


def part(record: Record, name: str, *arguments: str) -> list[str]:
    """A piece of this package as a process."""
    return [sys.executable, "-m", "gpu_kit", "part", name, str(record.path), *arguments]


def kernels(record: Record, number: int, limit: float) -> Step:
    """Unpacks the carried kernels and compiles what is missing."""
    return Step("kernels", part(record, "kernels", str(number)), limit)


def first(record: Record, interpreter: bool) -> list[Step]:
    """Does everything run, is it right, how long does each kernel take."""
    smoke = Step("smoke", part(record, "smoke"), 90, patience=45)
    times = Step("times", part(record, "times"), 210, patience=60)
    bits = Step("same bits", part(record, "same_bits"), 45, patience=30)
    machine = Step("machine", part(record, "machine"), 45, patience=40)
    if interpreter:
        return [machine, smoke, times, bits]
    driver, probe = places.built("driver"), places.built("rates")
    compile_driver = [
        "nvcc", "-std=c++17", "-arch=native", "-I", "csrc/cuda", "-x", "cu", "tests/txl_kernels/cuda/driver.cpp",
        "csrc/cuda/launch.cu", "-o", str(driver),
    ]  # fmt: skip
    sanitizer = ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9", str(driver)]
    profiles = [
        Step(f"counters, D{d}", part(record, "counters", str(d)), 60, needs=counters.COMMAND[0]) for d in (64, 128)
    ]
    return [
        Step("modules", part(record, "modules"), 300, beside=True),
        Step("driver built", compile_driver, 120, needs="nvcc", beside=True),
        Step("rates built", rates.build(probe), 60, needs="nvcc", beside=True),
        kernels(record, 1, 150),
        machine,
        smoke,
        Step("smoke, CUDA C++", part(record, "smoke_cuda"), 30, patience=20, after="modules"),
        times,
        bits,
        Step("rates", part(record, "rates", str(probe)), 20, after="rates built"),
        Step("racecheck", sanitizer, 40, needs=sanitizer[0], after="driver built"),
        *profiles,
    ]


def second(record: Record, interpreter: bool) -> list[Step]:
    """Which tiles are best."""
    sweep = Step("sweep", part(record, "sweep"), 330, patience=60)
    return [sweep] if interpreter else [kernels(record, 2, 180), sweep]


def third(record: Record, interpreter: bool) -> list[Step]:
    """The official record, and the tests."""
    folder = record.path.parent
    seconds = 30 if interpreter else 190
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-only", "--deadline", str(seconds),
        "--device", "interpreter" if interpreter else "cuda", "--record", str(folder / "gpu.json"),
        *(f"benchmarks/groups/test_{group}.py" for group in GROUPS),
    ]  # fmt: skip
    kept = [] if interpreter else ["-p", "gpu_kit.pytest_cache"]
    official = Step("official record", [*command, *kept], seconds + 50, after="modules")
    if interpreter:
        values = ["tests/txl_kernels/api/test_values.py", "-k", "matches_the_definition and window"]
        return [official, Step("tests", part(record, "tests", "2", "100", "triton", *values), 120)]
    shards = str(max(1, min(12, (os.cpu_count() or 2) - 2)))
    tests = part(record, "tests", shards, "180", "gpu", "tests/txl_kernels")
    memcheck = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--backends", "triton"]
    no_cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or torch's pool hides what is out of bounds
    return [
        Step("modules", part(record, "modules"), 300, beside=True),
        kernels(record, 3, 90),
        official,
        Step("tests", tests, 200, env={"TESTS_SHOW_FAILURES": "1"}),
        Step("models", [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *MODELS], 60),
        Step("memcheck", [*memcheck, *pytest, *SANITIZED], 60, needs=memcheck[0], env=no_cache),
    ]
