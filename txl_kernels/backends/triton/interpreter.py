"""Whether Triton's interpreter runs the kernels. Imports nothing, so that anyone may ask."""

import os


def interpreted() -> bool:
    """Whether kernels run on the cpu. Triton reads the variable when kernels are first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
