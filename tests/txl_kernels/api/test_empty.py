"""Calls without batch rows, queries or keys: results and gradients of the right shapes."""

from typing import Any

import pytest
import torch

from txl_kernels import rel_attention

T, D = 16, 8
TABLES: dict[str, Any] = {
    "a table for each head": (2, T, D), "a shared table": (1, T, D), "a table for each batch row": "rows", "no table": None,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "both sides": {"causal": False},
    "a window": {"window": 2},
    "chunks": {"chunk": (2, 1), "causal": False},
    "clamped": {"outside": "clamp"},
    "descending": {"r_descending": True, "zero_row": 9},
    "dropout": {"dropout_p": 0.1},
    "capped": {"softcap": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize(("B", "L", "M"), [(0, 3, 4), (2, 0, 0)])
def test_results_have_gradients(backend: str, B: int, L: int, M: int, table: Any, options: dict[str, Any]) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    q, k, v = (random(B, 2, L, D) for _ in range(3))
    memory = random(B, 2, M, D), random(B, 2, M, D)
    r = None if table is None else random(*((B, 2, T, D) if table == "rows" else table))
    r_bias = random(2, T) if r is None else None
    out, lse = rel_attention(
        q, k, v, r, memory=memory, r_bias=r_bias, return_lse=True, backend=backend, **{"zero_row": 5, **options}
    )
    assert out.shape == (B, 2, L, D)
    assert lse.shape == (B, 2, L)
    inputs = [x for x in (q, k, v, *memory, r, r_bias) if x is not None]
    for gradients in (torch.autograd.grad(x.sum(), inputs, retain_graph=True, allow_unused=True) for x in (out, lse)):
        assert all(g is None or not g.any() for g in gradients)
    assert all(g is not None for g in torch.autograd.grad(out.sum(), inputs))
