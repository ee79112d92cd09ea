"""Overhead of calls: small calls and start-up."""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from harness.case import Case, Shape
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
