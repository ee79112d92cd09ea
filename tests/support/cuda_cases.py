"""Calls that the CUDA kernels take and their checks; replacement of the compiled module."""

from typing import Any

import pytest
import torch
from cases import CASES, NO_BIASES, Case, as_call, make_inputs
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
# Inkling's terms: queries of positions, their scale, grouped heads, distances without a row, sinks.
_TERMS: dict[str, Any] = {
    "Dp": 16, "r": "1 T Dp", "zero_row": 0, "outside": "zero", "position_scale": 1.0, **NO_BIASES,
}  # fmt: skip
INKLING = [
    Case("Inkling, groups of three", B=2, H=6, Hkv=2, L=150, M=70, D=64, T=64, sink="H", **_TERMS),
    Case("Inkling, groups of eight, wide", B=1, H=8, Hkv=1, L=70, M=70, D=128, T=20, sink="B H L", **_TERMS),
    Case("Inkling, a table that ends inside a tile", B=1, H=1, L=300, M=100, D=128, T=130, **_TERMS),
    Case("Inkling, a window", B=1, H=2, Hkv=1, L=300, M=300, D=64, T=70, window=100, **_TERMS),
    Case("Inkling, tables of heads, width 8", B=1, H=2, Hkv=1, L=130, M=70, D=64, T=65, layout="lbhd",
         **_TERMS | {"r": "H T Dp", "Dp": 8}),
    Case("Inkling, bidirectional, a table in the middle", B=1, H=1, L=300, M=50, D=64, T=127, causal=False,
         **_TERMS | {"zero_row": 63}),
    Case("Inkling, bidirectional, rows of the future alone", B=1, H=1, L=260, M=0, D=128, T=60, causal=False,
         **_TERMS | {"zero_row": 150}),
    Case("Inkling, a table of one row, dropout", B=1, H=2, Hkv=1, L=130, M=100, D=64, T=1, dropout_p=0.2, **_TERMS),
    Case("Inkling, no distance has a row", B=1, H=1, L=100, M=30, D=64, T=2, **_TERMS | {"zero_row": 1000}),
    Case("Inkling, random intervals, sinks", B=2, H=2, Hkv=1, L=150, M=200, D=40, T=60, intervals="random",
         sink="B H L", causal=False, **_TERMS),
    Case("Inkling, queries that see nothing", B=1, H=2, Hkv=1, L=80, M=40, D=64, T=10, intervals="alternate", sink="H",
         **_TERMS),
    Case("Inkling, no visible keys", B=1, H=2, Hkv=1, L=70, M=40, D=64, T=10, intervals="nothing", sink="H", **_TERMS),
    Case("Inkling, one query", B=2, H=3, Hkv=1, L=1, M=200, D=128, T=100, sink="H", **_TERMS),
    Case("Inkling, seven queries", B=1, H=6, Hkv=2, L=7, M=300, D=64, T=100, sink="H", **_TERMS),
    Case("position queries, every distance has a row", B=1, H=1, L=64, M=64, D=64, Dp=16, extra_rows=70, **NO_BIASES),
]
UP_TO_SIXTEEN = [  # queries of decode that the Hopper kernels take
    Case("two queries", L=2, M=300, D=64, B=1, H=1),
    Case("five queries of a window, wide heads", L=5, M=300, D=128, B=1, H=1, window=70),
    Case("sixteen queries of several batch rows", L=16, M=37, D=40, intervals="random"),
]
SPLIT = [
    Case("memory", L=70, M=900, D=64, B=1, H=1),
    Case("a part without tiles", L=600, M=0, D=64, B=1, H=1),
    Case("memory, Inkling", B=1, H=2, Hkv=1, L=70, M=900, D=64, T=300, sink="H", **_TERMS),
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
