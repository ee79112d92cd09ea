"""Floating-point operations of the operators in torch's counter."""

import pytest
import torch
from cases import Case, as_call, make_inputs
from oracle import sees
from torch.utils.flop_counter import FlopCounterMode

from txl_kernels import rel_attention

CASES = {
    "causal with memory": Case(),
    "window": Case(window=4),
    "a narrow window": Case(window=1),
    "bidirectional": Case(causal=False, M=0),
    "one query": Case(L=1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_counts_products_of_visible_pairs(case: Case) -> None:
    """3 products of a pair forward and 8 backward."""
    x = make_inputs(case, torch.float32)
    pairs = case.B * case.H * sum(sees(x, 0, i, j, case.M) for i in range(case.L) for j in range(case.S))
    with FlopCounterMode(display=False) as counter:
        out = rel_attention(**as_call(x))
    assert counter.get_total_flops() == pairs * 2 * 3 * case.D
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == pairs * 2 * 8 * case.D


def test_values_of_another_width_without_a_table() -> None:
    q, k, v = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = rel_attention(q, k, v, None, r_bias=torch.randn(2, 6), window=(2, 0))
        assert counter.get_total_flops() == 2 * 15 * 2 * (8 + 4)
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 15 * 2 * (8 + 4 + 3 * 8 + 2 * 4)
