"""Facts about the attention that hold whatever computes it: each would break under a wrong
shift."""

import math

import pytest
import torch
from cases import DTYPES, Case, as_call, make_inputs

from txl_kernels import rel_attention, rel_attention_weights, sinusoid


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=1e-11 if a.dtype == torch.float64 else 2e-5)


def test_rotation_of_sinusoids_gives_the_positional_term(backend: str) -> None:
    """R_d is a sinusoid, so q . W R_{p-j} = rotate(W^T (q + v), p) . phi_j: no shift anywhere."""
    B, H, L, M, D, width = 2, 2, 5, 4, 6, 8
    case = Case("", B=B, H=H, L=L, M=M, D=D)
    x = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in make_inputs(case).items()}
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
    close(rel_attention(**as_call(call), backend=backend), want)


def test_two_segments_equal_one_of_twice_the_length(backend: str) -> None:
    whole = make_inputs(Case("", L=10, M=4), DTYPES[backend])
    call = as_call(whole)
    q, k, v, (k_mem, v_mem) = call["q"], call["k"], call["v"], call["memory"]
    want = rel_attention(**call, backend=backend)
    first = call | {"q": q[:, :, :5], "k": k[:, :, :5], "v": v[:, :, :5]}
    second = call | {"q": q[:, :, 5:], "k": k[:, :, 5:], "v": v[:, :, 5:]}
    second["memory"] = torch.cat([k_mem, k[:, :, :5]], 2), torch.cat([v_mem, v[:, :, :5]], 2)
    got = torch.cat([rel_attention(**part, backend=backend) for part in (first, second)], 2)
    close(got, want)


def test_moving_everything_changes_nothing(backend: str) -> None:
    """Hidden keys in front shift every absolute position and no distance."""
    inputs = make_inputs(Case("", L=5, M=4), DTYPES[backend])
    call = as_call(inputs)
    want = rel_attention(**call, backend=backend)
    k_mem, v_mem = (torch.cat([torch.randn(2, 2, 37, 8, dtype=x.dtype), x], 2) for x in call["memory"])
    start = torch.full((1, 1), 37, dtype=torch.int32)
    close(rel_attention(**call | {"memory": (k_mem, v_mem), "start": start}, backend=backend), want)


def test_parts_of_the_keys_merge_by_their_lse(backend: str) -> None:
    inputs = make_inputs(Case("", L=4, M=9), DTYPES[backend])
    call = as_call(inputs)
    want, want_lse = rel_attention(**call, return_lse=True, backend=backend)
    cut = torch.full((1, 1), 6, dtype=torch.int32)
    low = rel_attention(**call | {"end": cut}, return_lse=True, backend=backend)
    high = rel_attention(**call | {"start": cut}, return_lse=True, backend=backend)
    lse = torch.logaddexp(low[1], high[1])
    merged = sum(out * (part - lse).exp().unsqueeze(-1) for out, part in (low, high))
    close(lse, want_lse)
    close(merged, want)


def test_gradcheck_of_the_reference() -> None:
    inputs = make_inputs(Case("", B=1, L=2, M=2, D=2, intervals="empty", dropout_p=0.25))
    names = ("q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem")
    alive = torch.isfinite(rel_attention(**as_call(inputs), return_lse=True, backend="reference")[1])
    assert alive.any()

    def f(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        call = as_call(inputs | dict(zip(names, tensors, strict=True)))
        out, lse = rel_attention(**call, return_lse=True, backend="reference")
        return out, lse.where(alive, 0.0)

    assert torch.autograd.gradcheck(f, tuple(inputs[n] for n in names))
    assert torch.autograd.gradgradcheck(f, tuple(inputs[n] for n in names))


@pytest.mark.parametrize(
    "case",
    [
        Case("causal"), Case("both", causal=False, intervals="random"), Case("none", M=0),
        Case("numbers, capped", tables="r_bias", softcap=0.8),
    ],
    ids=str,
)  # fmt: skip
def test_weights_of_values_that_tell_keys_apart(case: Case) -> None:
    """With the identity for values, the output is the weights."""
    x = make_inputs(case)
    keys = case.S
    names = ("q", "k", "r", "content_bias", "position_bias")
    given = {n: x[n] for n in ("causal", "window", "start", "end", "zero_row", "softcap")} | {"r_bias": x.get("r_bias")}
    eye = torch.eye(keys, dtype=torch.float64).expand(case.B, case.H, keys, keys)
    memory = (x["k_mem"], eye[:, :, : case.M])
    tensors = {n: x[n] for n in names}
    want = rel_attention(**tensors, v=eye[:, :, case.M :], memory=memory, backend="reference", **given)
    got = rel_attention_weights(**tensors, k_mem=x["k_mem"], **given)
    torch.testing.assert_close(got, want)
