"""A backend's values and gradients against the float64 reference, which the oracle proves."""

import torch
from oracle import Case, as_call, gradients, make_inputs
from torch import Tensor

from txl_kernels import rel_attention

# Error of a result's norm, relative and (once) absolute.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-13}


def matches_the_reference(case: Case, dtype: torch.dtype, backend: str | None) -> None:
    inputs = make_inputs(case, dtype)
    leaves = {n for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    exact = {n: x.detach().double().requires_grad_() if n in leaves else x for n, x in inputs.items()}
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend=backend)
    want_out, want_lse = rel_attention(**as_call(exact), return_lse=True, backend="reference")
    got = {"out": out, "lse": lse} | gradients(out, lse, inputs)
    want = {"out": want_out, "lse": want_lse} | gradients(want_out, want_lse, exact)
    unit = TOLERANCES[dtype]
    for name, x in got.items():
        if want[name] is None:  # no memory, or nothing at all
            assert x is None or not x.any(), name
            continue
        y = want[name].detach()
        assert torch.equal(x.detach().isfinite(), y.isfinite()), name
        error = (x.detach().double() - y).where(y.isfinite(), 0.0).norm()
        size = y.where(y.isfinite(), 0.0).norm()
        more = 10 if name.endswith("bias") else 1  # sums over all queries and keys, which cancel
        assert error <= more * unit * (10 * size + 1), f"{name}: error {error:.3e} of {size:.3e}"
