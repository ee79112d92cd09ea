"""The GPU kernels themselves, in Triton."""
