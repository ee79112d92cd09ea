"""Errors of kernels against float64: at most twice those of the same algorithm in eager PyTorch
(Dao et al. 2022). Large scores: results and gradients are those of an exact softmax where float32
holds their differences; where it does not, no weight of backward is above 1, and on a CPU each
query's weights sum to 1."""

from typing import Any

import pytest
import torch
from cases import Case, as_call, detached, leaf, leaves, make_inputs
from error_budget import SHAPES, require_at_most_twice_eager
from torch import Tensor

from txl_kernels import rel_attention, rel_attention_weights
from txl_kernels.backends import triton
from txl_kernels.backends.triton import config


def gradients(x: dict[str, Any], backend: str) -> tuple[Tensor, Tensor]:
    """Gradients of q and of all values of the sum of out: a value's is the sum of its weights."""
    out = rel_attention(**as_call(x), backend=backend)
    found = dict(zip(leaves(x), torch.autograd.grad(out.sum(), list(leaves(x).values())), strict=True))
    assert all(g.isfinite().all() for g in found.values())
    return found["q"], torch.cat([found["v_mem"], found["v"]], 2)


def require_bounded(x: dict[str, Any], dq: Tensor, dv: Tensor) -> None:
    """Gradients are within the bounds that follow from weights of at most 1."""
    x = detached(x)
    length = x["q"].size(2)
    assert dv.min() >= 0
    assert dv.max() <= length * 1.0001
    # |dS| <= p |dP - delta|, so a query's gradient is at most that of one key against another,
    # times the sum of its weights.
    maximum = 2 * max(x[name].abs().sum(-1).max() for name in ("v_mem", "v") if x[name].numel())
    spread = 2 * (max(x[n].norm(dim=-1).max() for n in ("k_mem", "k") if x[n].numel()) + x["r"].norm(dim=-1).max())
    assert dq.norm(dim=-1).max() <= maximum * spread / 4 * max(1, dv.sum(2).max() / length)  # scale 1 / 4


@pytest.mark.parametrize("size", [1.0, 3e4, 1e7, 1e9])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 17, 70])
@pytest.mark.parametrize("memory", [0, 90])
def test_weights_are_at_most_one_in_backward(backend: str, length: int, memory: int, size: float) -> None:
    if triton.interpreted() and (size < 1e7 or length not in (1, 4, 70)):
        pytest.skip("the interpreter is slow")
    x = make_inputs(Case(L=length, M=memory, D=16, seed=length), torch.float32)
    with torch.no_grad():
        x["q"].mul_(size)
    dq, dv = gradients(x, backend)
    if size >= 1e7:
        require_bounded(x, dq, dv)
    if backend != "triton":
        torch.testing.assert_close(dv.sum(2), torch.full((2, 2, 16), float(length)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("length", [1, 4, 70])
def test_huge_terms_that_cancel(backend: str, length: int) -> None:
    """Scores of about 1 that are sums of 1e8 and -1e8, which each order of adding rounds
    differently."""
    x = make_inputs(Case(L=length, M=90, D=16, seed=length), torch.float32)
    with torch.no_grad():
        for names, value in (
            (("q",), 1),
            (("k", "k_mem"), 1e8),
            (("r",), -1e8),
            (("content_bias", "position_bias"), 0),
        ):
            for name in names:
                x[name][..., 0] = value
    require_bounded(x, *gradients(x, backend))


def exact_scores(length: int, memory: int, size: float, dtype: torch.dtype, spread: int) -> dict[str, Any]:
    """Inputs in float64 whose scores, size less 0 to `spread` of the dtype's steps at size (or
    ones), are the same in that dtype for every order of adding."""
    x = detached(make_inputs(Case(B=1, L=length, M=memory, D=4, scale=1.0, seed=length)))
    drawn = torch.randint(0, spread + 1, (1, 2, memory + length), generator=torch.Generator().manual_seed(length))
    for name in leaves(make_inputs(Case())).keys() - {"v", "v_mem"}:
        x[name].zero_()
    x["q"][..., 0] = 1
    score = (size - drawn.double() * max(1.0, abs(size) * torch.finfo(dtype).eps)).to(dtype).double()
    x["k_mem"][..., 0], x["k"][..., 0] = score.split([memory, length], 2)
    return x | {name: x[name].to(dtype).double() for name in ("v", "v_mem")}


def exact_weights(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of scores q . k, and the log of their sum relative to the largest."""
    length, keys = q.size(2), k.size(2)
    hidden = torch.arange(keys) > torch.arange(keys - length, keys).unsqueeze(1)
    score = (q @ k.mT).masked_fill(hidden, -torch.inf)
    return score.softmax(-1), (score - score.detach().amax(-1, keepdim=True)).exp().sum(-1).log()


def compared(given: dict[str, Any], dtype: torch.dtype, backend: str, **options: Any) -> dict[str, tuple[Tensor, ...]]:
    """A backend's out and gradients, through lse, too, beside the exact ones."""

    def run(dtype: torch.dtype, is_exact: bool) -> list[Tensor]:
        x = {n: leaf(y, dtype) if isinstance(y, Tensor) else y for n, y in given.items()}
        if is_exact:
            p, lse = exact_weights(x["q"], torch.cat([x["k_mem"], x["k"]], 2))
            out = p @ torch.cat([x["v_mem"], x["v"]], 2)
        else:
            out, lse = rel_attention(**as_call(x) | options, return_lse=True, backend=backend)
        generator = torch.Generator().manual_seed(3)
        weights = (torch.randn(y.shape, generator=generator).to(y.dtype) / 64 for y in (out, lse))
        loss = sum((y * weight).sum() for y, weight in zip((out, lse), weights, strict=True))
        return [out, *torch.autograd.grad(loss, [x[name] for name in ("k", "v", "k_mem", "v_mem")])]

    pairs = zip(run(dtype, False), run(torch.float64, True), strict=True)
    return dict(zip(("out", "dk", "dv", "dk_mem", "dv_mem"), pairs, strict=True))


@pytest.mark.parametrize("size", [100.0, -3e4, 1e6, -1e9, 1e32, -2e38])
@pytest.mark.parametrize("spread", [0, 3])
@pytest.mark.parametrize("length", [3, 40])
def test_softmax_of_large_scores(backend: str, length: int, spread: int, size: float) -> None:
    found = compared(exact_scores(length, 90, size, torch.float32, spread), torch.float32, backend)
    for name, (got, want) in found.items():
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6, msg=message)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 6e4), (torch.float16, -100.0), (torch.float64, 1e9), (torch.float64, -1e17), (torch.float64, 1e300)],
    ids=str,
)  # fmt: skip
def test_softmax_of_large_scores_in_other_dtypes(dtype: torch.dtype, size: float) -> None:
    x = exact_scores(20, 30, size, dtype, 3)
    tolerance = 5e-3 if dtype == torch.float16 else 1e-12
    for got, want in compared(x, dtype, "reference").values():
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)
    names = ("q", "k", "r", "content_bias", "position_bias")
    memory = x["k_mem"].to(dtype), x["v_mem"].to(dtype)
    p = rel_attention_weights(*(x[name].to(dtype) for name in names), memory, scale=1.0)
    want, _ = exact_weights(x["q"], torch.cat([x["k_mem"], x["k"]], 2))
    torch.testing.assert_close(p.double(), want, rtol=0, atol=1e-6 if dtype == torch.float16 else 1e-12)


@pytest.mark.parametrize("size", [-1e9, 1e32])
@pytest.mark.parametrize("host", ["reference", "native"])
def test_parts_of_a_prefix_share_large_scores(host: str, size: float) -> None:
    """Parts of one key each, so that lse is the score itself."""
    x = exact_scores(5, 3, size, torch.float32, 0)
    found = compared(x, torch.float32, host, prefix=1, window=1)
    torch.testing.assert_close(found["out"][0].double(), (x["v"] + x["v_mem"][:, :, :1]) / 2, rtol=0, atol=1e-6)
    torch.testing.assert_close(found["dv"][0] * 2, compared(x, torch.float32, host, window=1)["dv"][0])


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("height", [13.0, 60.0])
def test_values_near_the_largest_number(backend: str, length: int, height: float) -> None:
    """Weighted sums are finite where as many values are; scores rise from key to key."""
    x = {
        n: y.float() if isinstance(y, Tensor) else y for n, y in exact_scores(length, 70, 0.0, torch.float32, 0).items()
    }
    x["k"][..., 0] = height
    x["k_mem"][..., 0] = torch.linspace(0, height, 70)
    for value in (1e32, 3e36):
        values = {name: torch.full_like(x[name], value) for name in ("v", "v_mem")}
        out = rel_attention(**as_call(x | values), backend=backend)
        torch.testing.assert_close(out, torch.full_like(out, value), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_error_is_at_most_twice_that_of_eager(
    case: Case, dtype: torch.dtype, kernel_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton.interpreted():
        # The interpreter spends its time by the tile, and truncates where a GPU rounds to bfloat16.
        monkeypatch.setattr(config, "choose", lambda *args: config.Config(64, 64, 4, 1))
        dtype = torch.float16 if dtype == torch.bfloat16 else dtype
    require_at_most_twice_eager(case, dtype, kernel_backend)
