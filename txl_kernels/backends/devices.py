"""What every GPU backend asks of a device."""

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
