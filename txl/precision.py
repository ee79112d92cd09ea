"""Precision in which training and evaluation compute."""

import statistics
from collections.abc import Callable

import torch

from txl_kernels.backends import cpu

PRECISIONS = ("auto", "fp32", "bf16")
FASTER = 1.1  # bfloat16 is taken of its own accord where it is measured so many times as fast
ENOUGH_S = 2.0  # to time: many parts of a small model, one in each precision of a large one


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 if asked for, or if "auto" and the device is a GPU that multiplies it natively; else
    None. On a CPU "auto" is float32 until `txl.training.timing.with_precision` has measured."""
    helps = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and helps) else None


def may_help(device: torch.device) -> bool:
    """Whether this is a CPU whose units multiply bfloat16 faster than float32, so that measuring is
    worth its time."""
    return device.type == "cpu" and instruction_set() in ("amx", "avx512_bf16", "neon_bf16")


def instruction_set() -> str | None:
    """Instruction set of the CPU kernels; None where they are not built."""
    return None if cpu.native.module is None else cpu.native.module.isa()


def faster(seconds: Callable[[str], float], part: str, most: int | None = None) -> tuple[str, str]:
    """ "fp32", or "bf16" where that is `FASTER` by the medians; and what was measured, in words.

    seconds: of a part in the precision named, above 0 and the same in all processes; called for
    either in turns until it has returned `ENOUGH_S` in all, or `most` times. part: what it times,
    for the words.
    """
    taken: dict[str, list[float]] = {"fp32": [], "bf16": []}
    while sum(map(sum, taken.values())) < ENOUGH_S and (most is None or len(taken["fp32"]) < most):
        for name, times in taken.items():
            times.append(seconds(name))
    single, half = (statistics.median(times) for times in taken.values())
    name = "bf16" if single >= FASTER * half else "fp32"
    return name, f"precision: {name} ({part} takes {single:.3g} s in fp32, {half:.3g} s in bf16)"
