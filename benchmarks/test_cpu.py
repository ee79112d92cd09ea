"""What else the native backend promises: windows, threads, small calls, and memory that grows with length alone."""

import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contestants import Inputs, Shape, fused, make_inputs, timed
from interleave import CLOCK, interleaved, replay

from txl_kernels import available_backends, native, rel_attention
from txl_kernels.call import Call

pytestmark = [
    pytest.mark.skipif("native" not in available_backends(), reason="the native module is not built"),
    pytest.mark.benchmark(timer=CLOCK),
]
Times = dict[str, list[float]]


def _windowed(x: Inputs) -> torch.Tensor:
    tensors = [x[n] for n in ("q", "k", "v", "r", "content_bias", "position_bias")]
    return rel_attention(*tensors, (x["k_mem"], x["v_mem"]), window=128, backend="native")


@functools.cache
def window_times(backward: bool) -> Times:
    cases = {
        "window 128 of 640 keys": Shape(1, 8, 512, 128, 64),
        "window 128 of 8,192 keys": Shape(1, 8, 512, 7680, 64),
    }
    runs = {name: timed(_windowed, make_inputs(shape), backward) for name, shape in cases.items()}
    runs["all 640 keys"] = timed(fused, make_inputs(Shape(1, 8, 512, 128, 64)), backward)
    return interleaved(runs, seconds=3)


@pytest.mark.parametrize("name", ["window 128 of 640 keys", "window 128 of 8,192 keys", "all 640 keys"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
def test_window(benchmark: Any, report: Any, backward: bool, name: str) -> None:
    times = window_times(backward)[name]
    report(f"window, {'forward+backward' if backward else 'forward'}, B1 H8 L512 D64", name, times)
    replay(benchmark, times)


@functools.cache
def thread_times(backward: bool) -> Times:
    run = timed(fused, make_inputs(Shape(4, 8, 512, 512, 64)), backward)

    def with_threads(count: int) -> Callable[[], object]:
        def timed_run() -> None:
            torch.set_num_threads(count)
            run()

        return timed_run

    before = torch.get_num_threads()
    try:
        return interleaved({"2 threads": with_threads(2), "1 thread": with_threads(1)}, seconds=3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["2 threads", "1 thread"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
def test_threads(benchmark: Any, report: Any, backward: bool, name: str) -> None:
    if torch.get_num_threads() < 2:
        pytest.skip("torch has one thread")
    times = thread_times(backward)[name]
    report(f"threads, {'forward+backward' if backward else 'forward'}, B4 H8 L512 M512 D64", name, times)
    replay(benchmark, times)


@functools.cache
def pool_times() -> Times:
    x = {n: t.detach() for n, t in make_inputs(Shape(1, 8, 128, 384, 64)).items()}
    a, b = torch.randn(512, 512), torch.randn(512, 2048)

    def product() -> torch.Tensor:
        return a @ b

    def both() -> None:
        for _ in range(10):
            fused(x)
            product()

    runs: dict[str, Callable[[], object]] = {
        "attention and product in turn": both,
        "attention alone": lambda: [fused(x) for _ in range(10)],
        "product alone": lambda: [product() for _ in range(10)],
    }
    with torch.no_grad():
        times = interleaved(runs, seconds=2)
    return {name: [t / 10 for t in each] for name, each in times.items()}


@pytest.mark.parametrize("name", ["attention and product in turn", "attention alone", "product alone"])
def test_one_thread_pool(benchmark: Any, report: Any, name: str) -> None:
    """Two pools that spin against each other would make the whole slower than its parts."""
    times, share = pool_times(), ""
    if name.startswith("attention and"):
        parts = sum(statistics.median(times[n]) for n in times if n != name)
        share = f"{statistics.median(times[name]) / parts:.2f} of the sum of its parts"
    report(
        "one thread pool, attention B1 H8 L128 M384 D64 and [512, 512] @ [512, 2048]", name, times[name], share=share
    )
    replay(benchmark, times[name])


_CALLS = 200  # of a small call in one timing


@functools.cache
def overhead_times() -> Times:
    x = {n: t.detach() for n, t in make_inputs(Shape(1, 2, 8, 8, 64)).items()}
    tensors = [x[n] for n in ("q", "k", "v", "r", "content_bias", "position_bias")]
    memory = (x["k_mem"], x["v_mem"])
    call = Call(*tensors, *memory, None, None, None, True, None, 0, 0.125, 0.0)
    out = torch.empty_like(x["q"])
    plan = native.prepare().Plan(*native._arguments(call, out, None))
    threads = torch.get_num_threads()
    once: dict[str, Callable[[], object]] = {
        "rel_attention": lambda: rel_attention(*tensors, memory),
        "the kernel alone": lambda: plan.forward(call, out, None, threads, 0),
        "plain SDPA": lambda: F.scaled_dot_product_attention(x["q"], x["k_all"], x["v_all"]),
    }

    def repeat(f: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                for _ in range(_CALLS):
                    f()

        return run

    times = interleaved({name: repeat(f) for name, f in once.items()}, seconds=2)
    return {name: [t / _CALLS for t in each] for name, each in times.items()}


@pytest.mark.parametrize("name", ["rel_attention", "the kernel alone", "plain SDPA"])
def test_call_overhead(benchmark: Any, report: Any, name: str) -> None:
    times = overhead_times()
    share = ""
    if name == "rel_attention":
        extra = statistics.median(times[name]) - statistics.median(times["the kernel alone"])
        share = f"Python path {extra * 1e6:.1f} us"
    report("one small call, B1 H2 L8 M8 D64", name, times[name], share=share)
    replay(benchmark, times[name])


_LONG = """
import json, time, torch
from txl_kernels import rel_attention
length, heads = {length}, 8
tensors = [torch.randn(1, heads, length, 64, requires_grad=True) for _ in range(5)]
q, k, v, k_mem, v_mem = tensors
r = torch.randn(heads, 2 * length, 64, requires_grad=True)
biases = [torch.randn(heads, 64, requires_grad=True) for _ in range(2)]
def high_water():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # forgets the peak of importing torch
before = high_water()
begin = time.perf_counter()
rel_attention(q, k, v, r, *biases, (k_mem, v_mem), backend="native").sum().backward()
seconds = time.perf_counter() - begin
peak = high_water()
inputs = sum(x.numel() * 4 for x in (*tensors, r, *biases))
print(json.dumps({{"seconds": seconds, "extra_mib": (peak - before) / 1024, "inputs_mib": inputs / 2**20}}))
"""


@pytest.mark.parametrize("length", [2048, 4096, 16384])
def test_long_memory(request: pytest.FixtureRequest, benchmark: Any, report: Any, length: int) -> None:
    """Trains one layer of 8 heads over as much memory as segment; the scores alone would be 8 L x 2 L floats, thrice."""
    if length > 4096 and not request.config.getoption("--full"):
        pytest.skip("takes a minute: --full")
    done = subprocess.run(
        [sys.executable, "-c", _LONG.format(length=length)], capture_output=True, text=True, check=True
    )
    got = json.loads(done.stdout)
    scores = 8 * length * 2 * length * 4 / 2**20
    share = f"{got['extra_mib']:.0f} MiB beyond {got['inputs_mib']:.0f} of inputs; one matrix of scores {scores:.0f}"
    times = [got["seconds"]] * 2
    report("one layer forward+backward, B1 H8 D64, L = M", f"L = M = {length}", times, share=share, **got)
    replay(benchmark, times)
