"""Tolerances against exact results, and the two comparisons that use them."""

import torch
from torch import Tensor

# For each element, relative to the largest magnitude of the exact result.
OF_ELEMENTS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# For the norm of the error, relative to that of the exact result, and a tenth of it absolute.
OF_NORMS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}
# For elements, where both round the same values to the dtype but add them in another order.
OF_ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-7}


def largest(x: Tensor) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    return float(x.detach().where(x.isfinite(), 0.0).abs().amax()) if x.numel() else 0.0


def require_close(
    got: Tensor, want: Tensor, name: str, dtype: torch.dtype | None = None, *, minimum: float = 1.0
) -> None:
    """Check that each element of `got` is within OF_ELEMENTS times the largest magnitude of `want`,
    and at least `minimum`; infinities and NaN are in the same places. dtype: None for that of
    `got`."""
    unit = OF_ELEMENTS[dtype or got.dtype]
    torch.testing.assert_close(
        got.detach().double(), want.detach().double(), rtol=0, atol=unit * max(minimum, largest(want)),
        msg=lambda message: f"{name}: {message}",
    )  # fmt: skip


def require_small_error(got: Tensor, want: Tensor, name: str, dtype: torch.dtype, of_biases: int = 10) -> None:
    """Check that the norm of the error is within OF_NORMS, and infinities and NaN in the same
    places."""
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), name
    error = (got.detach().double() - want.detach()).where(finite, 0.0).norm()
    size = want.detach().where(finite, 0.0).norm()
    factor = of_biases if name.endswith("bias") else 1  # sums over all queries and keys, which cancel
    assert error <= factor * OF_NORMS[dtype] * (size + 0.1), f"{name}: error {error:.3e} of {size:.3e}"
