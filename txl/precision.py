"""Precision of training and evaluation."""

from typing import Literal

import torch

from txl_kernels.backends import cpu

PRECISIONS = ("auto", "fp32", "bf16")


def resolved(precision: str, device: torch.device) -> Literal["fp32", "bf16"]:
    """Return the precision, or for "auto" the one that the device multiplies faster: bf16 on a GPU
    with native bfloat16 and on a CPU with AMX or fast AVX512_BF16, else fp32. Arm's units
    (`neon_bf16`) do not count: they have been run in an emulator only."""
    bf16 = precision == "bf16"
    if precision == "auto" and device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif precision == "auto":
        bf16 = instruction_set() in ("amx", "avx512_bf16")
    return "bf16" if bf16 else "fp32"


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype for torch.autocast: bfloat16, or None for the parameters' own."""
    return torch.bfloat16 if resolved(precision, device) == "bf16" else None


def instruction_set() -> str | None:
    """Return the instruction set of the CPU kernels, or None if they are not built."""
    return None if cpu.native.module is None else cpu.native.module.isa()
