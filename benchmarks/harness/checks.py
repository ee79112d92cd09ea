"""The one measure of right and wrong: the relative error, by norms, against float64."""

import torch
from torch import Tensor

# Most of what rounding explains: several times what right implementations show.
MOST = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def require(got: Tensor, want: Tensor, name: str, most: float | None = None) -> None:
    """Raises AssertionError if got differs from want by more than its dtype explains (or than
    `most`), or is NaN."""
    most = MOST[got.dtype] if most is None else most
    error = float(((got.double() - want).norm() / want.norm()).detach())
    if not error <= most:
        dtype = str(got.dtype).removeprefix("torch.")
        raise AssertionError(f"{name} is wrong: relative error {error:.2g}, at most {most:g} is rounding in {dtype}")
