"""Precision of training and evaluation."""

import torch

from txl_kernels.backends import cpu

PRECISIONS = ("auto", "fp32", "bf16")


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return bfloat16 for "bfloat16", or for "auto" on a GPU with native bfloat16; else None. On a
    CPU "auto" gives None here: the commands decide by `multiplies_bf16`."""
    helps = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and helps) else None


def multiplies_bf16(device: torch.device) -> bool:
    """Whether this is a CPU known to multiply bfloat16 faster than float32. Arm's units
    (`neon_bf16`) do not count: they have been run in an emulator only."""
    return device.type == "cpu" and instruction_set() in ("amx", "avx512_bf16")


def instruction_set() -> str | None:
    """Return the instruction set of the CPU kernels, or None if they are not built."""
    return None if cpu.native.module is None else cpu.native.module.isa()
