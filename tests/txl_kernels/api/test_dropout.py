"""Dropout: known answers of the generator, the same bits in every backend, torch's seed."""

from collections.abc import Callable

import pytest
import torch
import torch._functorch.config as functorch
from cases import BY_NAME, DTYPES, Case, as_call, make_inputs
from oracle import attend
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from txl_kernels import rel_attention
from txl_kernels.call import drop_threshold, keep_mask, keep_scale, philox

# Known answers published with Random123 (Salmon et al. 2011), 7 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]) -> None:
    words = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(w) for w in words) == want


def dropped_entries(case: Case, backend: str, seed: int) -> torch.Tensor:
    """The mask a backend applied, read off its output: with uniform weights and one-hot values."""
    S = case.S
    zeros, values = torch.zeros(case.B, case.H, case.L, S), torch.eye(S).expand(case.B, case.H, S, S)
    out = rel_attention(
        zeros, zeros, values[:, :, case.M :], torch.zeros(case.H, S, S), torch.zeros(case.H, S), torch.zeros(case.H, S),
        (torch.zeros(case.B, case.H, case.M, S), values[:, :, : case.M]), dropout_p=case.dropout_p,
        dropout_seed=torch.tensor([seed]), backend=backend,
    )  # fmt: skip
    return out != 0


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3])
def test_mask_is_the_same_function_of_seed_and_indices(seed: int, backend: str) -> None:
    case = Case(B=2, H=2, L=21, M=31, dropout_p=0.4)
    keep = keep_mask(torch.tensor([seed]), case.B, case.H, case.L, case.S, case.dropout_p)
    visible = torch.ones(case.L, case.S, dtype=torch.bool).tril(case.M)
    assert torch.equal(dropped_entries(case, backend, seed), keep & visible)


@pytest.mark.parametrize(("p", "dropped"), [(1e-9, 1), (0.1, 6554), (1 - 1e-9, 65535)])
def test_threshold_and_factor_of_kept_weights(p: float, dropped: int, backend: str) -> None:
    """p in steps of 1 / 65536, 0 for 0 alone; the factor is that of the rounded p."""
    assert (drop_threshold(p), drop_threshold(0.0)) == (dropped, 0)
    assert keep_scale(p) == pytest.approx(1 / (1 - dropped / 65536), rel=1e-12)
    v = torch.ones(1, 1, 16, 64)
    q = torch.zeros_like(v)
    out = rel_attention(
        q, q, v, torch.zeros(1, 31, 64), torch.zeros(1, 64), torch.zeros(1, 64), zero_row=15, causal=False,
        dropout_p=p, dropout_seed=torch.tensor([3]), backend=backend,
    )  # fmt: skip
    kept = keep_mask(torch.tensor([3]), 1, 1, 16, 16, p).float().mean(3)
    torch.testing.assert_close(out[..., 0], kept * keep_scale(p), rtol=1e-5, atol=0)


def test_manual_seed_decides_the_mask(backend: str) -> None:
    call = as_call(make_inputs(Case(), torch.float32)) | {"dropout_p": 0.5, "backend": backend}
    torch.manual_seed(3)
    first, second = rel_attention(**call), rel_attention(**call)
    torch.manual_seed(3)
    assert torch.equal(rel_attention(**call), first)
    assert not torch.equal(first, second)


def test_both_halves_of_a_prefix_share_a_drawn_seed(backend: str) -> None:
    x = make_inputs(BY_NAME["prefix, both bounds, dropout"], DTYPES[backend])
    torch.manual_seed(1)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,))
    torch.manual_seed(1)
    results = [attend(x | {"dropout_seed": given}, backend=backend) for given in (None, seed)]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_no_dropout_draws_no_random_number(backend: str) -> None:
    inputs = make_inputs(Case(), torch.float32)
    state = torch.cuda.get_rng_state if inputs["q"].is_cuda else torch.get_rng_state
    before = state()
    rel_attention(**as_call(inputs), backend=backend)
    assert torch.equal(state(), before)


Step = Callable[[Tensor], Tensor]
KEEPING: dict[str, tuple[float, Callable[[Step, Tensor], Tensor]]] = {
    "half": (0.5, lambda step, v: step(step(v))),
    "half, once": (0.5, lambda step, v: step(v)),
    "checkpoint": (1.0, lambda step, v: checkpoint(lambda v: step(step(v)), v, use_reentrant=False)),
}


@pytest.mark.parametrize(
    ("keeping", "kernels"),
    [
        ("half", "native"),
        *(pytest.param(x, "native", marks=pytest.mark.slow) for x in KEEPING if x != "half"),
        pytest.param("half, once", "reference", marks=pytest.mark.slow),
    ],
)
def test_compiled_backward_drops_what_forward_dropped(keeping: str, kernels: str) -> None:
    """The output is linear in the values: their product with their gradient is the loss, if both
    had the same seeds. Each call has a seed of its own."""
    torch.compiler.reset()
    budget, around = KEEPING[keeping]
    inputs = make_inputs(Case(causal=False, M=0), torch.float32)
    call = {name: x for name, x in as_call(inputs).items() if name != "v"} | {"dropout_p": 0.5}
    v = inputs["v"].detach().requires_grad_()

    def step(v: Tensor) -> Tensor:
        return rel_attention(v=v, **call, backend=kernels)

    with functorch.patch(activation_memory_budget=budget):
        out = torch.compile(lambda v: around(step, v * 1.0), backend="aot_eager", fullgraph=True)(v)
        weights = torch.randn_like(out)
        (dv,) = torch.autograd.grad((out * weights).sum(), v)
    scale = (out * weights).abs().sum()
    torch.testing.assert_close((dv * v).sum() / scale, (out * weights).sum() / scale, atol=1e-5, rtol=0)


def test_compiled_calls_draw_the_seeds_of_eager_ones() -> None:
    torch.compiler.reset()
    call = as_call(make_inputs(Case(), torch.float32)) | {"dropout_p": 0.5}

    def twice() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return rel_attention(**call), rel_attention(**call)

    want = twice()
    assert not torch.equal(*want)
    torch.manual_seed(3)
    got = torch.compile(lambda: (rel_attention(**call), rel_attention(**call)), backend="aot_eager", fullgraph=True)()
    torch.testing.assert_close(got, want)
