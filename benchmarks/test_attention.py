"""Attention on the CPU: rel_attention against the same computed otherwise, beside the machine's own limits.

A contestant is compared with the float64 reference before it is timed; one that is wrong fails and gets no time. The
yardstick, scaled_dot_product_attention without positions, does two products forward where ours does three.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contestants import CONTESTANTS, FORWARD_ONLY, OURS, YARDSTICK, Shape, check, make_inputs, timed
from interleave import CLOCK, interleaved, replay
from limits import fma_peak, read_once

from txl_kernels import available_backends

pytestmark = pytest.mark.skipif("native" not in available_backends(), reason="the native module is not built")
FMA_PEAK, READ = "limit: FMA peak", "limit: reading k, v and r once"
BF16 = "rel_attention, native, bfloat16"
TRAINING, EVALUATION = Shape(4, 8, 512, 512, 64), Shape(1, 8, 128, 3800, 64)
SLOW = {"original, [B, H, L, S], compiled", "FlexAttention, captured bias"}  # to compile; shown once
Times = dict[str, list[float]]


@functools.cache
def measure(shape: Shape, backward: bool, names: tuple[str, ...]) -> tuple[Times, dict[str, Exception], list[float]]:
    """Times of the contestants that are right, what is wrong with the others, and FMA peaks measured in between."""
    runs: dict[str, Callable[[], object]] = {}
    wrong: dict[str, Exception] = {}
    peaks: list[float] = []
    for name in names:
        dtype = torch.bfloat16 if name == BF16 else torch.float32
        inputs = make_inputs(shape, dtype)
        if name == FMA_PEAK:
            runs[name] = lambda: peaks.append(fma_peak())
        elif name == READ:
            runs[name] = functools.partial(read_once, torch.zeros(shape.read_bytes(4) // 4))
        else:
            run = CONTESTANTS[OURS if name == BF16 else name]
            try:
                if name != YARDSTICK:
                    check(run, shape, dtype, backward)
            except Exception as error:
                wrong[name] = error
                continue
            runs[name] = timed(run, inputs, backward)
    return interleaved(runs, seconds=6), wrong, peaks


def operations(shape: Shape, contestant: str, backward: bool) -> float:
    """Useful floating-point operations: products over visible pairs; all pairs for the yardstick, which hides none."""
    if contestant == YARDSTICK:
        return shape.dense_product() * (7 if backward else 2)
    return shape.product() * (11 if backward else 3)


def attention_cases() -> list[Any]:
    cases = []
    for shape in (TRAINING, EVALUATION):
        for backward in (False, True):
            names = [n for n in CONTESTANTS if not (backward and n in FORWARD_ONLY)]
            names = [n for n in names if shape == TRAINING or n not in SLOW] + [BF16, FMA_PEAK]
            cases += [
                pytest.param(shape, backward, tuple(names), n, id=f"{shape}-{_direction(backward)}-{n}") for n in names
            ]
    return cases


def _direction(backward: bool) -> str:
    return "forward+backward" if backward else "forward"


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("shape", "backward", "names", "contestant"), attention_cases())
def test_attention(
    benchmark: Any, report: Any, shape: Shape, backward: bool, names: tuple[str, ...], contestant: str
) -> None:
    times, wrong, peaks = measure(shape, backward, names)
    if contestant in wrong:
        raise wrong[contestant]
    peak, share = statistics.median(peaks), ""
    if contestant == FMA_PEAK:
        share = f"{peak / 1e9:.0f} GFLOP/s"
    else:
        rate = operations(shape, contestant, backward) / statistics.median(times[contestant])
        share = f"{rate / 1e9:.0f} GFLOP/s useful, {rate / peak:.0%} of FMA peak"
    report(f"{_direction(backward)}, {shape}", contestant, times[contestant], share=share)
    replay(benchmark, times[contestant])


DECODE = [Shape(1, 8, 1, 3800, 64), Shape(1, 8, 1, 16000, 64)]
DECODE_NAMES = (OURS, "original, [B, H, L, S]", "SDPA with dense bias", YARDSTICK, BF16, READ)


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("contestant", DECODE_NAMES)
@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_decode(benchmark: Any, report: Any, shape: Shape, contestant: str) -> None:
    times, wrong, _ = measure(shape, False, DECODE_NAMES)
    if contestant in wrong:
        raise wrong[contestant]
    read = statistics.median(times[READ])
    bytes_read = shape.read_bytes(2 if contestant == BF16 else 4)
    rate = bytes_read / statistics.median(times[contestant])
    share = f"{rate / 1e9:.0f} GB/s" + (
        f", {rate * read / shape.read_bytes(4):.0%} of a plain read" if contestant in (OURS, BF16) else ""
    )
    report(f"decode, {shape}", contestant, times[contestant], share=share if contestant in (OURS, BF16, READ) else "")
    replay(benchmark, times[contestant])
