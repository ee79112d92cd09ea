"""Calls: their inputs, and the table on which every implementation is compared with the
definition."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from txl_kernels import bounds_from_cu_seqlens
from txl_kernels.call import INPUTS, Call
from txl_kernels.checks import span

TENSORS = tuple(name for name in INPUTS if name not in ("r_bias", "q_pos", "sink"))  # of a call as the paper's is
# What each backend's values are compared in: the most precise dtype it takes.
DTYPES = {"reference": torch.float64, "native": torch.float32, "triton": torch.float32}


@dataclass(frozen=True)
class Case:
    """One call: sizes and options. `str(case)` is its test id."""

    name: str
    B: int = 2
    H: int = 2
    L: int = 6
    M: int = 5
    D: int = 8
    Dv: int = 0  # 0: D
    Dp: int = 0  # 0: no q_pos
    Hkv: int = 0  # 0: H
    tables: str = "r"  # or r_bias, or both
    r_axes: tuple[int, ...] = ()  # leading axes of r: (): (H,)
    r_bias_heads: int = 0  # 0: H
    biases: bool = True
    softcap: float = 0.0
    sink: str = ""  # "", heads ([H]) or queries ([B, H, L])
    causal: bool = True
    window: int | tuple[int | None, int | None] | None = None
    chunk: tuple[int, int | None] | None = None
    prefix: int = 0
    intervals: str = ""  # "", random, start, end, padded, filled, episodes, empty, nothing, ended
    packed: tuple[int, ...] = ()  # lengths of texts in one row
    dropout_p: float = 0.0
    layout: str = "bhld"  # or lbhd, fused
    scale: float | None = None
    position_scale: float | None = None
    rows: int = 0  # of r and r_bias; 0: those needed
    extra_rows: int = 0  # beyond those
    zero_row: int | None = None  # None: the one that fits the rows needed
    outside: str = "refuse"
    r_descending: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def S(self) -> int:
        return self.M + self.L

    def table(self) -> tuple[int, int]:
        """Rows, and which of them is of distance 0."""
        left = self.window[0] if isinstance(self.window, tuple) else self.window and self.window - 1
        behind = self.S if left is None or self.prefix else min(self.S, left + 1)
        ahead = 0 if self.causal and not self.prefix else max(self.L - 1, 0)
        zero_row = max(behind - 1, 0) if self.r_descending else ahead
        return (self.rows or behind + ahead) + self.extra_rows, zero_row if self.zero_row is None else self.zero_row


def here(x: Tensor) -> Tensor:
    """On the default device: generators of inputs stay on the cpu, so that every device gets the
    same."""
    return x.to(torch.get_default_device())


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    return here(torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu"))


def intervals_of(case: Case, generator: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
    """start and end, int32, by name; None where the option does not use them."""
    B, L, M, S = case.B, case.L, case.M, case.S

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return here(torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int32, device="cpu"))

    if case.packed:
        ends = torch.tensor([0, *itertools.accumulate(case.packed)])
        start, end = bounds_from_cu_seqlens(ends, L)
        return start + M, end + M
    if case.intervals in ("random", "start", "end"):
        start, end = draw(0, S, B, L), draw(0, S, B, L)
        return start if case.intervals != "end" else None, end if case.intervals != "start" else None
    if case.intervals == "padded":
        return None, draw(1, S, B, 1)
    if case.intervals == "filled":
        return M - draw(0, M, B, 1), None
    if case.intervals == "episodes":
        resets = here(torch.rand(B, L, generator=generator, device="cpu")) < 0.4
        own = torch.where(resets, torch.arange(M, S), 0).cummax(1).values
        return own.int(), None
    if case.intervals == "empty":
        start = torch.zeros(1, L, dtype=torch.int32)
        start[:, ::2] = S
        return start, None
    if case.intervals == "nothing":
        return None, here(torch.zeros(1, 1, dtype=torch.int32))
    if case.intervals == "ended":
        return None, here(torch.full((1, 1), S // 3, dtype=torch.int32))
    return None, None


def _stored(shape: tuple[int, ...], layout: str, generator: torch.Generator) -> Tensor:
    B, H, L, D = shape
    if layout == "lbhd":
        return randn(L, B, H, D, generator=generator).permute(1, 2, 0, 3)
    if layout == "fused":
        return randn(B, L, 3, H, D + 2, generator=generator)[:, :, 1, :, 1:-1].transpose(1, 2)
    return randn(*shape, generator=generator)


def make_inputs(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Keyword arguments of `rel_attention`, with `k_mem` and `v_mem` beside the rest; leaves that
    require gradients. r and the biases may be None; `r_bias` and the options of forms are there
    where the case has them."""
    g = torch.Generator("cpu").manual_seed(case.seed)
    B, H, L, M, D, Dv = case.B, case.H, case.L, case.M, case.D, case.Dv or case.D
    rows, zero_row = case.table()
    Dp, Hkv = case.Dp or D, case.Hkv or H
    sizes = {"q": (H, D), "k": (Hkv, D), "v": (Hkv, Dv)}
    tensors = {name: _stored((B, heads, L, n), case.layout, g) for name, (heads, n) in sizes.items()}
    tensors["r"] = randn(*(case.r_axes or (H,)), rows, Dp, generator=g)
    tensors |= {name: randn(H, n, generator=g) for name, n in (("content_bias", D), ("position_bias", Dp))}
    tensors |= {name: _stored((B, Hkv, M, n), case.layout, g) for name, n in (("k_mem", D), ("v_mem", Dv))}
    if case.tables != "r":
        tensors["r_bias"] = randn(rows, case.r_bias_heads or H, generator=g).t()
    if case.Dp:
        tensors["q_pos"] = _stored((B, H, L, Dp), case.layout, g)
    if case.sink:
        tensors["sink"] = randn(*((B, H, L) if case.sink == "queries" else (H,)), generator=g)
    absent = {"r", "position_bias"} if case.tables == "r_bias" else set()
    absent |= set() if case.biases else {"content_bias", "position_bias"}
    start, end = intervals_of(case, g)
    given: dict[str, Any] = {"start": start, "end": end, "causal": case.causal, "window": case.window}
    given |= {"zero_row": zero_row, "scale": case.scale, "dropout_p": case.dropout_p, "softcap": case.softcap}
    given |= {n: x for n in ("chunk", "prefix", "position_scale", "r_descending") if (x := getattr(case, n))}
    given |= {} if case.outside == "refuse" else {"outside": case.outside}
    if case.dropout_p:
        given["dropout_seed"] = torch.tensor([-(2**62) + 12345])
    return given | cast(tensors, dtype) | dict.fromkeys(absent)


def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Rounded to dtype, strides kept, as fresh leaves."""

    def leaf(x: Tensor) -> Tensor:
        fresh = torch.empty_strided(x.size(), x.stride(), dtype=dtype)
        return fresh.copy_(x.detach()).requires_grad_()

    return {name: leaf(x) for name, x in tensors.items()}


def as_call(inputs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `rel_attention`: the two memory tensors as its pair."""
    call = {name: x for name, x in inputs.items() if name not in ("k_mem", "v_mem")}
    return call | {"memory": (inputs["k_mem"], inputs["v_mem"])}


def as_fields(inputs: dict[str, Any]) -> Call:
    """The call that `rel_attention` would make of `make_inputs`' arguments, as backends and
    operators take it."""
    B, H, L, D = inputs["q"].shape
    given = {"r_bias": None, "q_pos": None, "sink": None}
    given |= {name: x for name, x in inputs.items() if name in Call._fields}
    bounds = {name: None if inputs[name] is None else inputs[name].expand(B, L) for name in ("start", "end")}
    scale = D**-0.5 if inputs["scale"] is None else inputs["scale"]
    given["left"], given["right"] = span(inputs["causal"], inputs["window"])
    if given["position_bias"] is None:
        given["position_bias"] = inputs["q"].new_zeros(H, D)
    given |= bounds | {"scale": scale, "seed": inputs.get("dropout_seed")}
    given["position_scale"] = inputs.get("position_scale") or scale
    given["zero_outside"] = inputs.get("outside") == "zero"
    return Call(**given)


# The paper's formula, which every backend computes.
CASES = [
    Case("causal with memory"),
    Case("no memory", M=0),
    Case("one query", L=1, M=9),
    Case("one query without memory", L=1, M=0),
    Case("one memory key", M=1),
    Case("no queries", L=0),
    Case("no queries and no memory", L=0, M=0),
    Case("empty batch", B=0),
    Case("head width 1", D=1),
    Case("head width 41", D=41, H=1),
    Case("head width 80", D=80, H=1, B=1),
    Case("window", window=3),
    Case("window of one key", window=1),
    Case("window wider than everything", window=10**12),
    Case("bidirectional", causal=False),
    Case("bidirectional with a window", causal=False, window=4),
    Case("limited context, both sides", causal=False, window=(3, 2)),
    Case("limited context ahead", causal=False, window=(None, 1), L=9),
    Case("limited context, padded", causal=False, window=(2, 4), M=0, L=9, intervals="padded"),
    Case("two-sided window, causal", window=(2, 3)),
    Case("bidirectional and padded", causal=False, M=0, intervals="padded"),
    Case("random intervals", intervals="random"),
    Case("random intervals, bidirectional", intervals="random", causal=False),
    Case("memory partly filled", intervals="filled"),
    Case("episodes reset inside the segment", intervals="episodes"),
    Case("queries that see nothing", intervals="empty"),
    Case("dropout", dropout_p=0.3),
    Case("dropout with intervals", dropout_p=0.5, intervals="random", L=7),
    Case("[L, B, H, D] storage", layout="lbhd"),
    Case("fused projections", layout="fused"),
    Case("own scale", scale=0.37),
    Case("negative scale", scale=-0.5),
    Case("spare rows in r", extra_rows=3),
    Case("more queries than a block", L=53, M=11, B=1, H=1),
    Case("more keys than a tile", L=5, M=201, B=1, H=1),
]
# Terms that not every backend has.
TERMS = [
    Case("wide values", Dv=13),
    Case("narrow values, one query", L=1, M=9, D=19, Dv=3),
    Case("wide values, fused, no memory", Dv=24, layout="fused", M=0, causal=False),
    Case("numbers beside r", tables="both"),
    Case("numbers beside r, dropout, random intervals", tables="both", dropout_p=0.3, intervals="random", scale=-0.5),
    Case("numbers alone", tables="r_bias"),
    Case("numbers alone, bidirectional", tables="r_bias", causal=False, extra_rows=2),
    Case("numbers alone, one query", tables="r_bias", L=1, M=9),
    Case("softcap", softcap=0.7),
    Case("softcap of small and large scores", softcap=20.0, scale=3.0, window=5),
    Case("softcap, dropout, negative scale", softcap=1.5, dropout_p=0.4, scale=-0.8, intervals="random", causal=False),
    Case("numbers alone, softcap, wide values", tables="r_bias", softcap=2.0, Dv=20, causal=False, intervals="padded"),
    Case("everything, more than a tile", tables="both", softcap=2.0, Dv=5, L=40, M=45, B=1, H=1, causal=False),
]
# What Inkling's attention needs: queries of r, grouped heads, distances outside the table, sinks.
INKLING = [
    Case("position queries", Dp=3, biases=False),
    Case("position queries wider than keys", Dp=40, position_scale=0.7),
    Case("position queries and biases, bidirectional", Dp=16, causal=False, tables="both"),
    Case("position queries, one query", Dp=16, L=1, M=40),
    Case("position queries, few queries, wide values", Dp=5, L=3, M=21, Dv=11),
    Case("own scale of positions", position_scale=0.7),
    Case("own scale of numbers alone", tables="r_bias", position_scale=-1.3, scale=0.2),
    Case("position scale near 0", Dp=4, position_scale=1e-30, scale=-0.4),
    Case("distances outside", rows=4, zero_row=1, outside="zero"),
    Case("distances outside, bidirectional", rows=4, zero_row=2, outside="zero", causal=False, tables="both"),
    Case("distances outside, numbers alone", rows=3, zero_row=0, outside="zero", tables="r_bias"),
    Case("all distances outside", rows=2, zero_row=100, outside="zero", tables="both"),
    Case("distances outside, one query", L=1, M=37, rows=5, zero_row=0, outside="zero"),
    Case("distances outside, blocks and tiles", L=110, M=310, B=1, H=1, rows=40, zero_row=3, outside="zero", Dp=4),
    Case("distances outside, softcap, dropout", rows=4, zero_row=0, outside="zero", softcap=1.5, dropout_p=0.3,
         causal=False),
    Case("distances outside, random intervals", rows=4, zero_row=3, outside="zero", intervals="random", causal=False),
    Case("grouped heads", H=4, Hkv=2),
    Case("one head of keys", H=3, Hkv=1, M=0, causal=False),
    Case("grouped heads, one query", H=6, Hkv=2, L=1, M=40),
    Case("grouped heads, few queries", H=4, Hkv=1, L=3, M=21, Dv=5),
    Case("grouped heads, dropout", H=4, Hkv=2, dropout_p=0.3),
    Case("grouped heads, fused projections, wide values", H=4, Hkv=2, Dv=13, layout="fused"),
    Case("grouped heads, random intervals, numbers", H=4, Hkv=2, intervals="random", tables="both", causal=False),
    Case("grouped heads, more than a tile", H=4, Hkv=2, L=53, M=310, B=1),
    Case("sinks", sink="heads"),
    Case("sinks of each query", sink="queries", causal=False),
    Case("sinks, one query", sink="heads", L=1, M=9),
    Case("sinks, queries that see nothing", sink="queries", intervals="empty"),
    Case("sinks, dropout, softcap", sink="heads", dropout_p=0.3, softcap=1.5, causal=False),
    Case("sinks, parts of keys", sink="heads", B=1, H=1, L=5, M=1700),
    Case("Inkling", H=6, Hkv=2, Dp=16, D=24, r_axes=(1,), rows=7, zero_row=0, outside="zero", biases=False, L=40, M=9,
         position_scale=1.0, sink="heads"),
    Case("Inkling, window", H=4, Hkv=2, Dp=16, D=24, r_axes=(1,), rows=5, zero_row=0, outside="zero", biases=False,
         window=5, position_scale=1.0, scale=1 / 24),
    Case("Inkling, one query", H=6, Hkv=2, Dp=16, D=24, r_axes=(1,), rows=7, zero_row=0, outside="zero", biases=False,
         L=1, M=33, position_scale=1.0, sink="queries", intervals="start"),
    Case("Inkling, prefix, a table for each batch row", H=4, Hkv=2, Dp=5, r_axes=(2, 1), rows=4, zero_row=0,
         outside="zero", prefix=2, window=3, sink="heads", position_scale=0.6),
    Case("Inkling, descending, chunks, dropout", H=4, Hkv=2, Dp=5, rows=4, zero_row=2, r_descending=True, outside="zero",
         chunk=(3, 1), causal=False, sink="queries", dropout_p=0.3),
    Case("Inkling, prefix, both bounds, dropout", M=3, L=8, intervals="random", prefix=2, window=(3, 1), dropout_p=0.3,
         causal=False, H=4, Hkv=1, Dp=5, sink="queries"),
]  # fmt: skip
# Forms that are reduced to calls of the kernels.
FORMS = [
    Case("no biases, a table of more rows", biases=False, rows=16, zero_row=5),
    Case("descending", r_descending=True, causal=False),
    Case("descending, causal, no memory", M=0, r_descending=True),
    Case("a table for all heads", r_axes=(1,)),
    Case("clamped", r_axes=(1,), rows=4, zero_row=2, biases=False, outside="clamp", causal=False),
    Case("clamped, descending, causal", rows=3, zero_row=1, outside="clamp", r_descending=True),
    Case("clamped by one row", rows=1, zero_row=0, outside="clamp", window=(3, 2), causal=False),
    Case("clamped table that is long enough", outside="clamp", causal=False),
    Case("numbers for all heads, no biases", tables="both", r_bias_heads=1, biases=False, D=7),
    Case("numbers, clamped, descending", tables="both", rows=4, zero_row=2, r_axes=(1,), outside="clamp", r_descending=True,
         causal=False),
    Case("numbers alone, clamped, descending", tables="r_bias", rows=4, zero_row=2, outside="clamp", r_descending=True,
         causal=False),
    Case("numbers alone for all heads, prefix, softcap", tables="r_bias", r_bias_heads=1, Dv=3, prefix=2, window=2,
         softcap=1.5),
    Case("numbers and a table for each batch row, chunks", tables="both", r_axes=(2, 1), r_bias_heads=1, M=3, chunk=(2, 1),
         causal=False),
    Case("wide values, numbers, no biases", Dv=20, tables="both", biases=False),
    Case("a table for each batch row", r_axes=(2, 2)),
    Case("a table for each batch row and all heads", r_axes=(2, 1), intervals="start", causal=False),
    Case("tables for each batch row, dropout", r_axes=(2, 2), dropout_p=0.4),
    Case("chunks", M=0, L=11, chunk=(3, 1), causal=False),
    Case("chunks after memory", M=4, L=7, chunk=(2, 2), causal=False),
    Case("chunks that see all before", L=7, M=3, chunk=(3, None), causal=False),
    Case("chunks without context, padded", M=0, L=7, intervals="end", chunk=(3, 0), causal=False),
    Case("chunks with a start", L=7, M=6, intervals="start", chunk=(3, 1), causal=False),
    Case("prefix of a window", prefix=2, window=3),
    Case("prefix beyond the segment's start", M=1, L=7, prefix=4),
    Case("prefix of everything", M=1, prefix=7, window=2),
    Case("prefix and padding on the left", M=3, intervals="start", prefix=3, causal=False),
    Case("prefix, both bounds, dropout", M=3, L=8, intervals="random", prefix=2, window=(3, 1), dropout_p=0.3,
         causal=False),
    Case("prefix, narrow values, numbers", Dv=4, tables="both", prefix=2, window=2),
    Case("prefix of an end that hides all", M=0, intervals="end", prefix=1),
    Case("all at once", r_axes=(1,), Dv=5, tables="both", rows=5, zero_row=2, intervals="random", prefix=3,
         window=(2, 2), outside="clamp", r_descending=True, scale=0.3, softcap=0.8, causal=False),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES + TERMS + FORMS + INKLING}
