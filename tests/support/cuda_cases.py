"""Calls that the CUDA kernels take and their checks; replacement of the compiled module."""

from typing import Any

import pytest
import torch
from cases import CASES, Case, as_call, make_inputs
from oracle import matches_the_reference

from txl_kernels import prepare, rel_attention
from txl_kernels.backends import cuda


def use(
    monkeypatch: pytest.MonkeyPatch, module: Any, multiprocessors: int = 8, capability: tuple[int, int] = (9, 0)
) -> None:
    """Let the backend run cpu tensors by this module; plans of other modules are dropped."""
    monkeypatch.setattr(prepare, "_memo", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(cuda.native, "module", module)
    monkeypatch.setattr(cuda, "_why_not_device", lambda device: None)
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(cuda, "_stream", lambda device: 0)


def fits(case: Case) -> Case:
    """The case, with a head width and a number of queries that these kernels take."""
    return case.but(D=-(-case.D // 8) * 8, L=min(case.L, 16))


MATRIX = [fits(case) for case in CASES] + [
    Case("sixteen queries", L=16, M=37, D=64, B=1),
    Case("five queries, many parts", L=5, M=300, D=16, B=1, H=1),
    Case("one query, many parts", L=1, M=700, D=64, B=1, H=1),
    Case("parts that some queries do not see", L=7, M=300, D=8, B=1, H=1, window=70),
    Case("intervals over many parts", L=4, M=400, D=8, B=2, H=1, intervals="random"),
    Case("dropout over many parts", L=6, M=150, D=16, B=1, dropout_p=0.4),
    *(Case(f"head width {d}", L=3, M=20, D=d, B=1, H=2) for d in (24, 64, 96, 128, 136, 192, 256)),
    Case("sixteen queries of width 256", L=16, M=200, D=256, B=1, H=1),
]


# For the Hopper kernels, which take any number of queries and compute gradients: a tile is 64 x 64,
# a block 64 or 128 queries.
HOPPER = [fits(case).but(L=case.L) for case in CASES if case.B and case.L and case.layout != "fused"] + [
    Case("blocks and tiles that end anywhere", L=200, M=100, D=64, B=1, H=2),
    Case("wide heads", L=150, M=70, D=128, B=1, H=2),
    Case("whole tiles, bidirectional", L=64, M=64, D=64, B=1, H=1, causal=False),
    Case("no memory, bidirectional, width 96", L=257, M=0, D=96, B=1, H=1, causal=False),
    Case("window over tiles", L=300, M=300, D=64, B=1, H=1, window=100),
    Case("window, wide heads, dropout", L=300, M=100, D=128, B=1, H=1, window=70, dropout_p=0.2),
    Case("dropout over tiles", L=150, M=100, D=64, B=1, H=2, dropout_p=0.3),
    Case("intervals over tiles", L=150, M=200, D=40, B=2, H=1, intervals="random"),
    Case("episodes over tiles", L=150, M=100, D=64, B=2, H=1, intervals="episodes"),
    Case("padded, bidirectional", L=150, M=0, D=64, B=2, H=1, causal=False, intervals="padded"),
    Case("storage [L, B, H, D] over tiles", L=130, M=70, D=64, layout="lbhd", scale=-0.2, extra_rows=5),
    Case("no scale", L=70, M=10, D=64, scale=0.0),
    Case("no visible keys", L=150, M=40, D=64, B=1, H=1, intervals="nothing"),
    Case("no visible keys, wide heads", L=70, M=10, D=128, B=1, H=1, intervals="nothing"),
    Case("blocks that see nothing", L=260, M=0, D=64, B=1, H=1, window=30, intervals="ended"),
    Case("blocks that see nothing, wide heads", L=200, M=0, D=128, B=1, H=1, window=30, intervals="ended"),
]
UP_TO_SIXTEEN = [  # queries of decode that the Hopper kernels take
    Case("two queries", L=2, M=300, D=64, B=1, H=1),
    Case("five queries of a window, wide heads", L=5, M=300, D=128, B=1, H=1, window=70),
    Case("sixteen queries of several batch rows", L=16, M=37, D=40, intervals="random"),
]
SPLIT = [
    Case("memory", L=70, M=900, D=64, B=1, H=1),
    Case("a part without tiles", L=600, M=0, D=64, B=1, H=1),
]


def forward(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return rel_attention(**as_call(make_inputs(case, dtype)), return_lse=True, backend="cuda")


def within_the_error_budget(case: Case, dtype: torch.dtype) -> None:
    """Compare with the reference; the error of out is at most twice that of the same call computed
    by the reference in the same dtype, both against float64."""
    out, exact = matches_the_reference(case, dtype, "cuda")
    with torch.no_grad():
        plain = rel_attention(**as_call(make_inputs(case, dtype)), backend="reference")
        errors = [float((x.double() - exact).norm()) for x in (out, plain)]
    assert errors[0] <= 2 * errors[1] + 1e-3 * float(exact.norm())
