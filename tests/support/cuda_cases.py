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


def inkling(name: str, group: int, L: int, T: int, **changed: Any) -> Case:
    """A case of Inkling's attention with two heads of keys: `group` query heads on each, L queries,
    a table of T distances for all heads."""
    given: dict[str, Any] = {
        "B": 2, "H": 2 * group, "Hkv": 2, "L": L, "M": 70, "D": 24, "Dp": 16, "r": "1 T Dp", "T": T, "zero_row": 0,
        "outside": "zero", "position_scale": 1.0, "sink": "H", **NO_BIASES,
    }  # fmt: skip
    return Case(name, **given | changed)


# Inkling's terms, which the decode kernels take for up to 4 queries. A part of 64 keys has up to 67
# rows of r, a thread of 128 one of them.
INKLING = [
    *(inkling(f"group of {g}, {n} queries", g, n, 5 + 20 * n, B=1) for g in (1, 3, 8) for n in (1, 2, 4)),
    inkling("uneven blocks of a group", 5, 4, 40, B=1),
    inkling("table that ends with a part", 3, 3, 64, M=253),
    inkling("table that ends with a part of one query", 3, 1, 64, M=127, sink="B H L"),
    inkling("table that ends inside a part, many parts", 3, 4, 100, M=700, B=1),
    inkling("table of one row", 3, 2, 1),
    inkling("table longer than the keys", 2, 3, 300),
    inkling("all distances outside", 2, 2, 2, zero_row=100),
    inkling("keys after the query", 3, 4, 9, zero_row=2, causal=False, sink="B H L"),
    inkling("table without its first distances", 2, 4, 3, zero_row=2, causal=False),
    inkling("rows of a query for each thread, and more", 3, 4, 400, M=509, B=1, H=3, Hkv=1),
    inkling("window", 3, 4, 30, window=40, scale=1 / 24),
    inkling("window over parts", 3, 2, 90, window=150, M=400, B=1),
    inkling("random intervals", 3, 4, 20, intervals="random", sink="B H L"),
    inkling("start", 3, 1, 7, intervals="start", sink="B H L"),
    inkling("end, one head of keys", 2, 3, 30, H=4, Hkv=1, intervals="end"),
    inkling("queries that see nothing", 3, 4, 20, intervals="alternate", sink="B H L"),
    inkling("no visible keys", 3, 2, 20, intervals="nothing"),
    inkling("dropout", 3, 4, 20, dropout_p=0.4, B=1),
    inkling("dropout over many parts, random intervals", 8, 3, 90, dropout_p=0.3, M=200, intervals="random", B=1),
    inkling("no memory", 3, 4, 3, M=0),
    inkling("negative scale", 3, 2, 20, scale=-0.5, position_scale=0.3),
    inkling("no scale of content", 3, 2, 20, scale=0.0),
    inkling("fused projections, rows at any address", 3, 4, 40, layout="fused"),
    inkling("position queries of width 8", 3, 4, 40, Dp=8),
    inkling("position queries as wide as keys, 40", 3, 4, 40, D=40, Dp=40),
    inkling(
        "a table for each head, biases", 3, 4, 150, M=200, B=1, r="H T Dp", content_bias="H D", position_bias="H Dp"
    ),
    inkling("a table for each head, one query", 8, 1, 40, r="H T Dp", position_bias="H Dp"),
    *(inkling(f"head width {d}", 3, 2, 40, D=d, B=1) for d in (64, 128, 136, 256)),
    Case("grouped heads", H=6, Hkv=2, L=3, M=90),
    Case("one head of keys, one query", H=8, Hkv=1, L=1, M=90, D=64),
    Case("sinks alone", L=4, M=9, sink="H"),
    Case("sinks of each query, many parts", L=2, M=300, sink="B H L", B=1, H=1),
    Case("distances outside", L=3, M=40, T=6, zero_row=0, outside="zero"),
    Case("distances outside, one query", L=1, M=37, T=5, zero_row=0, outside="zero"),
    Case("position scale", L=4, position_scale=0.7),
    Case("position queries and biases", L=4, M=21, D=16, Dp=8, causal=False),
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
# Inkling's terms in the Hopper kernels.
ONE: dict[str, Any] = {"B": 1, "H": 1, "Hkv": 1, "sink": None}
HOPPER_INKLING = [
    inkling("groups of three", 3, 150, 64, D=64),
    inkling("groups of eight, wide", 8, 70, 20, B=1, H=8, Hkv=1, D=128, sink="B H L"),
    inkling("a table that ends inside a tile", 1, 300, 130, M=100, D=128, **ONE),
    inkling("a window of tiles", 1, 300, 70, B=1, M=300, D=64, window=100),
    inkling("tables of heads, width 8", 2, 130, 65, B=1, H=2, Hkv=1, D=64, layout="lbhd", r="H T Dp", Dp=8),
    inkling("bidirectional, a table in the middle", 1, 300, 127, M=50, D=64, causal=False, zero_row=63, **ONE),
    inkling("bidirectional, rows of the future alone", 1, 260, 60, M=0, D=128, causal=False, zero_row=150, **ONE),
    inkling("a table of one row, dropout", 2, 130, 1, B=1, H=2, Hkv=1, M=100, D=64, dropout_p=0.2),
    inkling("no distance has a row", 1, 100, 2, M=30, D=64, zero_row=1000, **ONE),
    inkling("intervals and sinks", 1, 150, 60, M=200, D=40, intervals="random", sink="B H L", causal=False),
    inkling("every other query sees nothing", 2, 80, 10, B=1, H=2, Hkv=1, M=40, D=64, intervals="alternate"),
    inkling("nothing is visible", 2, 70, 10, B=1, H=2, Hkv=1, M=40, D=64, intervals="nothing"),
    inkling("seven queries", 3, 7, 100, B=1, M=300, D=64),
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
    inkling("memory, Inkling", 2, 70, 300, B=1, H=2, Hkv=1, M=900, D=64),
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
