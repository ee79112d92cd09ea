"""Overhead of calls: small calls and start-up."""

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import DIRECTIONS, Case, Shape
from harness.comparison import Comparison, Entry, Implementation, comparisons
from harness.internals import native_kernel
from harness.machine import Machine
from implementations.attention import BASELINE, NAMES, Inputs, check, fused, make_inputs, rel_attention_on
from txl_kernels import rel_attention

SMALL_CALL = Shape(1, 2, 8, 8, 64)
_CALLS = 200  # number of small calls in one timing


@comparisons("cpu", "cuda")
def test_call_overhead(machine: Machine, full: bool) -> list[Comparison]:
    def inputs() -> Inputs:
        return {n: t.detach() for n, t in make_inputs(SMALL_CALL, machine.dtype, machine.device).items()}

    def repeat(call: Callable[[], object], checked: Any = None) -> Entry:
        def run() -> None:
            with torch.no_grad():
                for _ in range(_CALLS):
                    call()

        return Entry(run, checked, per=_CALLS)

    def alone() -> Entry:
        x = inputs()
        return repeat(native_kernel([x[n] for n in (*NAMES, "k_mem", "v_mem")]))

    def ours(backend: str) -> Entry:
        checked = functools.partial(
            check, functools.partial(fused, backend=backend), False, machine.dtype, machine.device, SMALL_CALL
        )
        x = inputs()
        tensors, memory = [x[n] for n in NAMES], (x["k_mem"], x["v_mem"])
        return repeat(functools.partial(rel_attention, *tensors, memory, backend=backend), checked)

    def plain() -> Entry:
        x = inputs()
        return repeat(functools.partial(F.scaled_dot_product_attention, x["q"], x["k_all"], x["v_all"]))

    runs = [
        Implementation(rel_attention_on(name).name, functools.partial(ours, name), "ours")
        for name in machine.decode_backends
    ]
    if "native" in machine.backends:
        runs.append(Implementation("the native kernel alone", alone, "part"))
    runs.append(Implementation(BASELINE.name, plain, BASELINE.role))
    return [Comparison("call overhead", Case(direction="forward", shape=SMALL_CALL), runs, clock="wall", seconds=2)]


_HOST_SHAPE, _DECODE_SHAPE = Shape(2, 4, 128, 128, 64), Shape(1, 8, 1, 3100, 64)


@comparisons("cpu", backend=None)
def test_host_time(machine: Machine, full: bool) -> list[Comparison]:
    """CPU time of a thread for calls on Triton's kernels, as for a GPU, with a driver that launches
    nothing: what a GPU waits for where no CUDA graph runs."""
    pretended_gpu = pytest.importorskip("pretended_gpu", reason="Triton is not installed")

    def entry(shape: Shape, capability: int, gradients: bool, keys_more: int = 0) -> Entry:
        """keys_more: keys by which the memory of a call is longer than that of the call before."""
        count = _CALLS // 4 if gradients else _CALLS
        longest = shape._replace(M=shape.M + keys_more * count)
        given = {n: x.detach().bfloat16() for n, x in make_inputs(longest, torch.float32, machine.device).items()}
        tensors = [given[n].requires_grad_(gradients) for n in NAMES]
        memory = [[given[n][:, :, : shape.M + keys_more * i] for n in ("k_mem", "v_mem")] for i in range(count)]
        dout = torch.zeros_like(given["q"])

        def call(k_mem: Tensor, v_mem: Tensor) -> None:
            out = rel_attention(*tensors, (k_mem, v_mem), backend="triton")
            if gradients:
                torch.autograd.grad(out, tensors, dout)

        def run() -> float:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # parts of the workspace are cleared on the CPU here
            try:
                with pretended_gpu.launching(capability, lambda *launch: None), torch.set_grad_enabled(gradients):
                    call(*memory[0])
                    began = time.thread_time()
                    for keys in memory:
                        call(*keys)
                    return (time.thread_time() - began) / count
            finally:
                torch.set_num_threads(threads)

        return Entry(run)

    def ours(name: str, *given: Any) -> Implementation:
        return Implementation(name, functools.partial(entry, *given), "ours", "bfloat16")

    names = {capability: f"triton as for sm_{capability}" for capability in (80, 90)}
    found = [
        Comparison(
            "host time of a call",
            Case(direction=direction, shape=_HOST_SHAPE),
            [ours(name, _HOST_SHAPE, x, direction != "forward") for x, name in names.items()],
            clock="own",
        )
        for direction in DIRECTIONS
    ]
    decode = [
        ours(name + ", a key more at each call" * keys_more, _DECODE_SHAPE, x, False, keys_more)
        for x, name in names.items()
        for keys_more in (0, 1)
    ]
    found.append(Comparison("host time of a call", Case(direction="forward", shape=_DECODE_SHAPE), decode, clock="own"))
    return found


_FIRST_CALL = """
import torch, txl_kernels
q, k, v = torch.randn(3, 1, 8, 128, 64, device="{device}")
r, biases = torch.randn(8, 128, 64, device="{device}"), torch.randn(2, 8, 64, device="{device}")
txl_kernels.rel_attention(q, k, v, r, *biases).sum().item()
"""


@comparisons("cpu", "cuda", backend=None)
def test_start_up(machine: Machine, full: bool) -> list[Comparison]:
    """Whole processes, timed from the launch of Python to its end."""

    def process(code: str) -> Entry:
        def run() -> None:
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

        return Entry(run)

    first_call = _FIRST_CALL.format(device=machine.device)
    runs = [
        Implementation("import txl_kernels", functools.partial(process, "import txl_kernels"), "ours"),
        Implementation("import txl_kernels, and the first call", functools.partial(process, first_call), "ours"),
        Implementation(
            "import txl (model and commands)", functools.partial(process, "import txl, txl.commands.cli"), "ours"
        ),
        Implementation("baseline: import torch", functools.partial(process, "import torch"), "baseline"),
    ]
    case = Case(unit="process", note="whole processes")
    return [Comparison("start-up", case, runs, clock="wall", seconds=1, minimum=3)]
