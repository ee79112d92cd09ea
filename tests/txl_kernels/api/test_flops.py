"""torch's counter of floating-point operations knows the operators."""

from typing import Any

import pytest
import torch
from cases import Case, as_call, make_inputs
from torch.utils.flop_counter import FlopCounterMode

from txl_kernels import rel_attention
from txl_kernels.call import Call, intervals
from txl_kernels.checks import span

CASES: dict[str, tuple[Case, int, int]] = {  # products of width D a visible pair, forward and backward
    "causal with memory": (Case(""), 3, 8),
    "window": (Case("", window=4), 3, 8),
    "a narrow window": (Case("", window=1), 3, 8),
    "bidirectional": (Case("", causal=False, M=0), 3, 8),
    "one query": (Case("", L=1), 3, 8),
}


def visible(call: dict[str, Any]) -> int:
    """By the reference's intervals."""
    q, memory, window = call["q"], call.get("memory"), call.get("window")
    k_mem = None if memory is None else memory[0]
    left, right = span(call.get("causal", True), window)
    unused: Any = (None,) * 6
    low, high = intervals(Call(q, q, q, None, q, q, k_mem, k_mem, *unused, left, right, 0, 1.0, 0.0, 0.0, 1.0, False))
    return int((high - low).clamp(min=0).sum()) * q.size(0) * q.size(1)


@pytest.mark.parametrize(("case", "forward", "backward"), CASES.values(), ids=CASES)
def test_counts_products_of_visible_pairs(case: Case, forward: int, backward: int) -> None:
    call = as_call(make_inputs(case, torch.float32))
    pairs, width = visible(call), call["q"].size(3)
    with FlopCounterMode(display=False) as counter:
        out = rel_attention(**call)
    assert counter.get_total_flops() == pairs * 2 * forward * width
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == pairs * 2 * backward * width


def test_values_of_another_width_without_a_table() -> None:
    q, k, v = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = rel_attention(q, k, v, None, r_bias=torch.randn(2, 6), window=(2, 0))
        assert counter.get_total_flops() == 2 * 15 * 2 * (8 + 4)
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 15 * 2 * (8 + 4 + 3 * 8 + 2 * 4)
