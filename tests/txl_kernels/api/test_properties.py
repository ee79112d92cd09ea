"""Random shapes, strides, intervals and dtypes: every backend against the float64 reference."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import TENSORS, Case, as_call, gradients, make_inputs

from txl_kernels import rel_attention


def cases(length: int, memory: int, widths: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    """Calls of up to `length` queries and `memory` keys before them."""
    return st.builds(
        Case,
        name=st.just(""),
        B=st.integers(1, 2),
        H=st.integers(1, 3),
        L=st.integers(1, length),
        M=st.integers(0, memory),
        D=widths,
        causal=st.booleans(),
        window=st.none() | st.integers(1, 300),
        intervals=st.sampled_from(["", "random", "padded", "filled", "episodes", "empty"]),
        dropout_p=st.sampled_from([0.0, 0.2]),
        layout=st.sampled_from(["bhld", "lbhd", "fused"]),
        seed=st.integers(0, 2**16),
    )


def test_kernels_match_the_reference(kernel_backend: str) -> None:
    examples, calls = 60, cases(120, 420, st.integers(1, 70))
    if kernel_backend == "triton":  # compiled anew for every width, or interpreted
        examples, calls = 10, cases(40, 50, st.sampled_from([16, 41, 64]))

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=calls, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def check(case: Case, dtype: torch.dtype) -> None:
        matches_the_reference(case, dtype, kernel_backend)

    check()


def matches_the_reference(case: Case, dtype: torch.dtype, backend: str) -> None:
    inputs = make_inputs(case, dtype)
    exact = {n: x.detach().double().requires_grad_() if n in TENSORS else x for n, x in inputs.items()}
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend=backend)
    want_out, want_lse = rel_attention(**as_call(exact), return_lse=True, backend="reference")
    got = {"out": out, "lse": lse} | gradients(out, lse, inputs)
    want = {"out": want_out, "lse": want_lse} | gradients(want_out, want_lse, exact)
    unit = 2e-6 if dtype == torch.float32 else 2e-2
    for name, x in got.items():
        y = want[name].detach()
        assert torch.equal(x.detach().isfinite(), y.isfinite()), name
        error = (x.detach().double() - y).where(y.isfinite(), 0.0).norm()
        size = y.where(y.isfinite(), 0.0).norm()
        assert error <= 10 * unit * size + unit, f"{name}: error {error:.3e} of {size:.3e}"
