"""Dropout: known answers of the generator, the same bits everywhere, and torch's seed in charge."""

import pytest
import torch
from oracle import Case, as_call, make_inputs

from txl_kernels import rel_attention
from txl_kernels.call import keep_mask, philox

# Known answers published with Random123 (Salmon et al. 2011): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]) -> None:
    words = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(w) for w in words) == want


def dropped_entries(case: Case, backend: str, seed: int) -> torch.Tensor:
    """The mask a backend applied, read off its output: with uniform weights and one-hot values."""
    S = case.S
    zeros = torch.zeros(case.B, case.H, case.L, S)
    values = torch.eye(S).expand(case.B, case.H, S, S)
    out = rel_attention(
        zeros, zeros, values[:, :, case.M :], torch.zeros(case.H, S, S), torch.zeros(case.H, S), torch.zeros(case.H, S),
        (torch.zeros(case.B, case.H, case.M, S), values[:, :, : case.M]), dropout_p=case.dropout_p,
        dropout_seed=torch.tensor([seed]), backend=backend,
    )  # fmt: skip
    return out != 0


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3])
def test_mask_is_the_same_function_of_seed_and_indices(seed: int, backend: str) -> None:
    case = Case("", B=2, H=2, L=21, M=31, dropout_p=0.4)
    keep = keep_mask(torch.tensor([seed]), case.B, case.H, case.L, case.S, case.dropout_p)
    visible = torch.ones(case.L, case.S, dtype=torch.bool).tril(case.M)
    assert torch.equal(dropped_entries(case, backend, seed), keep & visible)


def test_share_of_dropped_entries() -> None:
    keep = keep_mask(torch.tensor([5]), 4, 4, 64, 256, 0.3)
    assert abs(keep.float().mean() - 0.7) < 4 * (0.3 * 0.7 / keep.numel()) ** 0.5


def test_manual_seed_governs_it(backend: str) -> None:
    call = as_call(make_inputs(Case(""), torch.float32)) | {"dropout_p": 0.5, "backend": backend}
    torch.manual_seed(3)
    first, second = rel_attention(**call), rel_attention(**call)
    torch.manual_seed(3)
    assert torch.equal(rel_attention(**call), first)
    assert not torch.equal(first, second)


def test_no_dropout_draws_no_random_number(backend: str) -> None:
    inputs = make_inputs(Case(""), torch.float32)
    state = torch.cuda.get_rng_state if inputs["q"].is_cuda else torch.get_rng_state
    before = state()
    rel_attention(**as_call(inputs), backend=backend)
    assert torch.equal(state(), before)
