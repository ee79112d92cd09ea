"""What several ask of a device: is it a GPU the kernels are for, and what does autocast do on
it."""

import functools

import torch


@functools.cache
def gpu_lacks(device: torch.device) -> str | None:
    """Why kernels for NVIDIA GPUs from sm_80 on do not run on a CUDA device; None if they do."""
    if torch.version.hip is not None:
        return "the kernels here are for NVIDIA GPUs; ROCm is not supported"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"a GPU of compute capability 8.0 or newer is needed, {device} has {major}.{minor}"


def can_autocast(device_type: str) -> bool:
    """Whether torch.autocast knows the device."""
    return torch.amp.is_autocast_available(device_type)


# torch.compile asks once, while it traces: that of torch 2.6 cannot follow the question.
setattr(can_autocast, "_dynamo_marked_constant", True)  # noqa: B010


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What torch.autocast casts to on the device; None where it is off."""
    if not can_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
