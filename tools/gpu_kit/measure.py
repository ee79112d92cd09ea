"""Seconds of something that runs on the device: by events, and of each kernel by the profiler."""

import itertools
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[], object]
SECONDS, LEAST, MOST = 0.15, 3, 30  # of repetitions
PROFILED = 5


def device() -> torch.device:
    """The GPU, or the CPU where there is none (in the interpreter)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def alive() -> None:
    """Raises where the device answers no more."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(run: Run) -> dict[str, Any]:
    """ms: median from event to event, launches included; kernels: microseconds of each in a run;
    sm_mhz: the clock while it ran. Of a CPU ms alone."""
    run()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return {"ms": (time.perf_counter() - begin) * 1e3, "rounds": 1}
    pilot = _events(run, 2)
    count = int(min(MOST, max(LEAST, SECONDS * 1e3 / max(pilot[-1], 1e-3))))
    times = _events(run, count)
    kernels = profiled(run, min(PROFILED, count))
    return {"ms": statistics.median(times), "fastest_ms": min(times), "rounds": count, "kernels": kernels} | {
        "sm_mhz": clock_under(run, statistics.median(times))
    }


def _events(run: Run, count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def profiled(run: Run, count: int) -> dict[str, float]:
    """Microseconds of each kernel in one run, by name."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            run()
        torch.cuda.synchronize()
    total: Counter[str] = Counter()
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            total[event.name[:80]] += event.time_range.elapsed_us() / count
    return {name: round(us, 3) for name, us in total.most_common(12)}


def clock_under(run: Run, ms: float) -> int:
    """MHz of the multiprocessors while a quarter of a second of runs is worked off."""
    for _ in range(max(1, min(2000, int(250 / max(ms, 1e-3))))):
        run()
    done = torch.cuda.Event()
    done.record()
    clocks = [sm_mhz()]
    while not done.query():
        time.sleep(0.02)
        clocks.append(sm_mhz())
    return int(statistics.median(clocks))


def sm_mhz() -> int:
    """As the driver says it now: at once by its library, where Python has it."""
    try:
        return int(torch.cuda.clock_rate(0))
    except (ModuleNotFoundError, RuntimeError):
        return int(smi("clocks.sm"))


def smi(query: str) -> str:
    """One line of nvidia-smi, of the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
