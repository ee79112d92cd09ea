"""Precision in which training and evaluation compute."""

import torch

from txl_kernels.backends import cpu

PRECISIONS = ("auto", "fp32", "bf16")


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 if asked for, or if "auto" and the device is a GPU that multiplies it natively; else
    None. On a CPU "auto" is float32 here: the commands decide by `multiplies_bf16`."""
    helps = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and helps) else None


def multiplies_bf16(device: torch.device) -> bool:
    """Whether this is a CPU whose units are known to multiply bfloat16 faster than float32: Arm's
    (`neon_bf16`) have run in an emulator only."""
    return device.type == "cpu" and instruction_set() in ("amx", "avx512_bf16")


def instruction_set() -> str | None:
    """Instruction set of the CPU kernels; None where they are not built."""
    return None if cpu.native.module is None else cpu.native.module.isa()
