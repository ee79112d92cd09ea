"""What training computes in."""

import torch


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 if asked for, or if "auto" and the device multiplies it natively; else None."""
    helps = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and helps) else None
