"""Identities of the attention: each would break under a wrong shift."""

import inspect
import math

import pytest
import torch
from cases import BIAS_ALONE, DTYPES, TENSORS, Case, as_call, detached, make_inputs

from txl_kernels import rel_attention, rel_attention_weights, sinusoid


def test_rotation_of_sinusoids_gives_the_positional_term(backend: str) -> None:
    """R_d is a sinusoid, so q . W R_{p-j} = rotate(W^T (q + v), p) . phi_j: no shift anywhere."""
    B, H, L, M, D, width = 2, 2, 5, 4, 6, 8
    case = Case(B=B, H=H, L=L, M=M, D=D)
    x = detached(make_inputs(case))
    w_r = torch.randn(H, D, width, dtype=torch.float64)
    x["r"] = torch.einsum("tm,hdm->htd", sinusoid(torch.arange(M + L), width, torch.float64), w_r)
    q, k, v = x["q"], torch.cat([x["k_mem"], x["k"]], 2), torch.cat([x["v_mem"], x["v"]], 2)

    into_model = torch.einsum("bhid,hdm->bhim", q + x["position_bias"][:, None], w_r)  # [sin part | cos part]
    a, b = into_model.chunk(2, -1)
    frequency = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    p = torch.arange(M, M + L, dtype=torch.float64)[:, None] * frequency
    # a sin((p-j)f) + b cos((p-j)f) = (b cos pf + a sin pf) cos jf + (b sin pf - a cos pf) sin jf
    rotated = torch.cat([b * p.sin() - a * p.cos(), b * p.cos() + a * p.sin()], -1)
    phi = sinusoid(torch.arange(M + L), width, torch.float64)
    score = (torch.einsum("bhid,bhjd->bhij", q + x["content_bias"][:, None], k) + rotated @ phi.T) / math.sqrt(D)
    hidden = torch.ones(L, M + L, dtype=torch.bool).triu(M + 1)
    want = score.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    call = {n: t.to(DTYPES[backend]) if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    got = rel_attention(**as_call(call), backend=backend)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-11 if got.dtype == torch.float64 else 2e-5)


def test_gradcheck_of_the_reference() -> None:
    inputs = make_inputs(Case(B=1, L=2, M=2, D=2, intervals="alternate", dropout_p=0.25))
    alive = torch.isfinite(rel_attention(**as_call(inputs), return_lse=True, backend="reference")[1])
    assert alive.any()

    def f(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        call = as_call(inputs | dict(zip(TENSORS, tensors, strict=True)))
        out, lse = rel_attention(**call, return_lse=True, backend="reference")
        return out, lse.where(alive, 0.0)

    assert torch.autograd.gradcheck(f, tuple(inputs[n] for n in TENSORS))
    assert torch.autograd.gradgradcheck(f, tuple(inputs[n] for n in TENSORS))


@pytest.mark.parametrize(
    "case",
    [
        Case("causal"), Case("both", causal=False, intervals="random"), Case("none", M=0),
        Case("bias alone, capped", **BIAS_ALONE, softcap=0.8),
    ],
    ids=str,
)  # fmt: skip
def test_weights_are_the_output_for_one_hot_values(case: Case) -> None:
    x, keys = make_inputs(case), case.S
    eye = torch.eye(keys, dtype=torch.float64).expand(case.B, case.H, keys, keys)
    want = rel_attention(**as_call(x | {"v": eye[:, :, case.M :], "v_mem": eye[:, :, : case.M]}), backend="reference")
    names = inspect.signature(rel_attention_weights).parameters.keys() - {"unknown"}
    inputs = as_call(x)
    torch.testing.assert_close(rel_attention_weights(**{name: inputs[name] for name in names}), want)
