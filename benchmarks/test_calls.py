"""What a call costs besides its arithmetic: small calls, start-up, threads, and sharing torch's thread pool."""

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from contestants import check, entry, fused
from inputs import NAMES, Inputs, Shape, make_inputs
from machine import Machine
from race import Entry, Race, races

from txl_kernels import rel_attention
from txl_kernels.backends import cpu
from txl_kernels.call import Call

SMALL_CALL = Shape(1, 2, 8, 8, 64)
_CALLS = 200  # of a small call in one timing


def overhead(machine: Machine, full: bool) -> list[Race]:
    if machine.kind == "rehearsal" or not machine.backends:
        return []

    def inputs() -> Inputs:
        return {n: t.detach() for n, t in make_inputs(SMALL_CALL, machine.dtype, machine.device).items()}

    def repeat(call: Callable[[], object], checked: Any = None) -> Entry:
        def run() -> None:
            with torch.no_grad():
                for _ in range(_CALLS):
                    call()

        return Entry(run, checked, per=_CALLS)

    def alone() -> Entry:
        """The native kernel itself, arguments already examined."""
        x = inputs()
        tensors = [x[n] for n in (*NAMES, "k_mem", "v_mem")]
        call = Call(*tensors, None, None, None, True, None, 0, 0.125, 0.0)
        out = torch.empty_like(x["q"])
        plan = cpu.make_plan(call, out)
        threads = torch.get_num_threads()
        return repeat(lambda: plan.forward(call, out, None, threads, 0))

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

    runs = {f"rel_attention, {name}": functools.partial(ours, name) for name in machine.backends_for_few_queries}
    if "native" in machine.backends:
        runs["the native kernel alone"] = alone
    runs["yardstick: plain SDPA"] = plain
    return [Race("call overhead", "B1 H2 L8 M8 D64", runs, clock="wall", seconds=2)]


@races(overhead)
def test_call_overhead(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


_FIRST_CALL = """
import torch, txl_kernels
q, k, v = torch.randn(3, 1, 8, 128, 64, device="{device}")
r, biases = torch.randn(8, 128, 64, device="{device}"), torch.randn(2, 8, 64, device="{device}")
txl_kernels.rel_attention(q, k, v, r, *biases).sum().item()
"""


def start_up(machine: Machine, full: bool) -> list[Race]:
    """Whole processes, from the launch of Python to its end."""
    if machine.kind == "rehearsal":
        return []

    def process(code: str) -> Entry:
        def run() -> None:
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

        return Entry(run)

    programs = {
        "import txl_kernels": "import txl_kernels",
        "import txl_kernels, and the first call": _FIRST_CALL.format(device=machine.device),
        "import txl (model and commands)": "import txl, txl.cli",
        "yardstick: import torch": "import torch",
    }
    runs = {name: functools.partial(process, code) for name, code in programs.items()}
    return [Race("start-up", "whole processes", runs, clock="wall", seconds=1, least=3)]


@races(start_up)
def test_start_up(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


def threads(machine: Machine, full: bool) -> list[Race]:
    most = torch.get_num_threads()
    if machine.kind != "cpu" or "native" not in machine.backends or most < 2:
        return []

    def with_threads(count: int, backward: bool) -> Entry:
        made = entry(functools.partial(fused, backend="native"), machine, Shape(4, 8, 512, 512, 64), backward)

        def run() -> float:
            torch.set_num_threads(count)
            try:
                begin = time.perf_counter()
                made.run()
                return time.perf_counter() - begin
            finally:
                torch.set_num_threads(most)

        return Entry(run, made.check)

    return [
        Race(
            "threads",
            f"{'forward+backward' if backward else 'forward'}, B4 H8 L512 M512 D64",
            {
                f"rel_attention, native, {n} thread{'s' * (n > 1)}": functools.partial(with_threads, n, backward)
                for n in (most, 1)
            },
            clock="own",
            seconds=3,
        )
        for backward in (False, True)
    ]


@races(threads)
def test_threads(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


def pool(machine: Machine, full: bool) -> list[Race]:
    """Two pools that spin against each other would make the whole slower than its parts."""
    if machine.kind != "cpu" or "native" not in machine.backends:
        return []
    times = 10

    def repeat(*calls: Callable[[], object]) -> Entry:
        def run() -> None:
            with torch.no_grad():
                for _ in range(times):
                    for call in calls:
                        call()

        return Entry(run, per=times)

    def attention() -> Callable[[], object]:
        return functools.partial(fused, make_inputs(Shape(1, 8, 128, 384, 64)), "native")

    def product() -> Callable[[], object]:
        return functools.partial(torch.mm, torch.randn(512, 512), torch.randn(512, 2048))

    runs = {
        "attention and product in turn": lambda: repeat(attention(), product()),
        "attention alone": lambda: repeat(attention()),
        "product alone": lambda: repeat(product()),
    }
    return [Race("one thread pool", "attention B1 H8 L128 M384 D64, [512, 512] @ [512, 2048]", runs, seconds=2)]


@races(pool)
def test_one_thread_pool(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)
