"""Calls of `rel_attention`, on which every implementation is compared with the definition. A new
term of the formula needs a `Case` here and its lines in `oracle.py`."""

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor

from txl_kernels import bounds_from_cu_seqlens, rel_attention
from txl_kernels.call import Call
from txl_kernels.checks import span

_PARAMETERS = inspect.signature(rel_attention).parameters.values()
DEFAULTS = {p.name: p.default for p in _PARAMETERS if p.name not in ("memory", "return_lse", "backend")}
SIZES = {"B": 2, "H": 2, "Hkv": 0, "L": 6, "M": 5, "D": 8, "Dv": 0, "Dp": 0, "T": 0}
# The tensors of the paper's call. A case may leave some out, give them other axes, and add others.
AXES = {
    "q": "B H L D", "k": "B Hkv L D", "v": "B Hkv L Dv", "r": "H T Dp", "content_bias": "H D", "position_bias": "H Dp",
    "k_mem": "B Hkv M D", "v_mem": "B Hkv M Dv",
}  # fmt: skip
TENSORS = tuple(AXES)
# The dtype in which values of each backend are compared: the most precise one that it takes.
DTYPES = {"reference": torch.float64, "native": torch.float32, "triton": torch.float32}


class Case:
    """A call: sizes, and arguments of `rel_attention`. `str(case)` is its test id.

    A tensor is given by its axes, which are names in `SIZES` or "1", or None where the call has
    none; any other argument by its value, see `DEFAULTS`.

    Args:
        name: test id.
        Hkv, Dv: 0 for H and D.
        Dp: width of the position queries, q_pos; 0 for none.
        T: rows of r and r_bias; 0 for as many as the visible distances need.
        extra_rows: rows beyond these.
        layout: storage of tensors with an axis L or M: "bhld", "lbhd", or "fused", a slice of one
            projection for q, k and v.
        intervals: how start and end are made, see `bounds_of`; or lengths of packed sequences.
        seed: seed of the random values.
    """

    def __init__(
        self, name: str = "", *, extra_rows: int = 0, layout: str = "bhld", intervals: str | tuple[int, ...] = "",
        seed: int = 0, **given: Any,
    ) -> None:  # fmt: skip
        assert given.keys() <= SIZES.keys() | DEFAULTS.keys() | AXES.keys(), given
        self.name, self.layout, self.intervals, self.extra_rows, self.seed = name, layout, intervals, extra_rows, seed
        self.given = given
        self.__dict__.update(SIZES | DEFAULTS | given)
        self.Hkv, self.Dv, self.Dp = self.Hkv or self.H, self.Dv or self.D, self.Dp or self.D
        self.S = self.M + self.L
        axes = AXES | ({"q_pos": "B H L Dp"} if self.given.get("Dp") else {}) | given
        self.axes = {n: x for n, x in axes.items() if isinstance(x, str) and set(x.split()) <= {*SIZES, "1"}}
        self._set_table()

    def _set_table(self) -> None:
        """Set T and zero_row to what the visible distances need, where the case does not say."""
        left = self.window[0] if isinstance(self.window, tuple) else self.window and self.window - 1
        past = self.S if left is None or self.prefix else min(self.S, left + 1)
        future = 0 if self.causal and not self.prefix else max(self.L - 1, 0)
        self.T = (self.T or max(past + future, 1)) + self.extra_rows
        self.zero_row = self.given.get("zero_row", max(past - 1, 0) if self.r_descending else future)

    def but(self, name: str | None = None, **changed: Any) -> "Case":
        """Return the case with another name, sizes or arguments."""
        made = {n: getattr(self, n) for n in ("extra_rows", "layout", "intervals", "seed")}
        return Case(self.name if name is None else name, **made | self.given | changed)

    def __str__(self) -> str:
        return self.name

    def _key(self) -> tuple[Any, ...]:
        return self.name, self.extra_rows, self.layout, self.intervals, self.seed, *sorted(self.given.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def here(x: Tensor) -> Tensor:
    """On the default device: generators of inputs stay on the cpu, so that every device gets the
    same."""
    return x.to(torch.get_default_device())


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    return here(torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu"))


def bounds_of(case: Case, generator: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
    """start and end, int32, by the name of how they are made; None where the call has none."""
    B, L, M, S = case.B, case.L, case.M, case.S

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return here(torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int32, device="cpu"))

    match case.intervals:
        case tuple(lengths):
            start, end = bounds_from_cu_seqlens(torch.tensor([0, *itertools.accumulate(lengths)]), L)
            return start + M, end + M
        case "random" | "start" | "end":
            start, end = draw(0, S, B, L), draw(0, S, B, L)
            return start if case.intervals != "end" else None, end if case.intervals != "start" else None
        case "padded":
            return None, draw(1, S, B, 1)
        case "filled":  # in part: the memory
            return M - draw(0, M, B, 1), None
        case "episodes":
            resets = here(torch.rand(B, L, generator=generator, device="cpu")) < 0.4
            return torch.where(resets, torch.arange(M, S), 0).cummax(1).values.int(), None
        case "alternate":  # every other query sees nothing
            return (torch.arange(L, dtype=torch.int32) % 2 == 0).int()[None] * S, None
        case "nothing":
            return None, here(torch.zeros(1, 1, dtype=torch.int32))
        case "ended":
            return None, here(torch.full((1, 1), S // 3, dtype=torch.int32))
    return None, None


def _drawn(axes: str, case: Case, generator: torch.Generator) -> Tensor:
    shape = [int(getattr(case, n, n)) for n in axes.split()]
    if axes.endswith("T"):  # [T, H], as an embedding is stored
        return randn(*shape[::-1], generator=generator).t()
    if len(shape) == 4 and axes.split()[2] in "LM" and case.layout != "bhld":
        B, H, L, D = shape
        if case.layout == "lbhd":
            return randn(L, B, H, D, generator=generator).permute(1, 2, 0, 3)
        return randn(B, L, 3, H, D + 2, generator=generator)[:, :, 1, :, 1:-1].transpose(1, 2)
    return randn(*shape, generator=generator)


def make_inputs(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Return all keyword arguments of `rel_attention`, with `k_mem` and `v_mem` in place of
    `memory`; tensors of the case's axes are leaves that require gradients."""
    g = torch.Generator("cpu").manual_seed(case.seed)
    tensors = {name: leaf(_drawn(axes, case, g), dtype) for name, axes in case.axes.items()}
    settings = {name: getattr(case, name) for name in DEFAULTS if name not in AXES}
    start, end = bounds_of(case, g)
    seed = torch.tensor([-(2**62) + 12345]) if case.dropout_p else None
    return dict.fromkeys(AXES) | settings | {"start": start, "end": end, "dropout_seed": seed} | tensors


def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded to dtype as a fresh leaf with its strides."""
    fresh = torch.empty_strided(x.size(), x.stride(), dtype=dtype)
    return fresh.copy_(x.detach()).requires_grad_()


def leaves(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that require gradients."""
    return {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}


def in_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the same arguments with the tensors that require gradients as float64 leaves."""
    return inputs | {name: x.detach().double().requires_grad_() for name, x in leaves(inputs).items()}


def detached(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {name: x.detach() for name, x in leaves(inputs).items()}


def as_call(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for `rel_attention`: the two memory tensors as its pair."""
    call = {name: x for name, x in inputs.items() if name not in ("k_mem", "v_mem")}
    return call | {"memory": (inputs["k_mem"], inputs["v_mem"])}


def as_fields(inputs: dict[str, Any]) -> Call:
    """Return the call that `rel_attention` would make of `make_inputs`' arguments, as backends and
    operators take it."""
    q, scale = inputs["q"], inputs["scale"]
    scale = q.size(3) ** -0.5 if scale is None else scale
    left, right = span(inputs["causal"], inputs["window"])
    made = {"left": left, "right": right, "scale": scale, "position_scale": inputs["position_scale"] or scale}
    made |= {n: None if inputs[n] is None else inputs[n].expand(q.size(0), q.size(2)) for n in ("start", "end")}
    made |= {n: q.new_zeros(q.shape[1::2]) for n in ("content_bias", "position_bias") if inputs[n] is None}
    made |= {"seed": inputs["dropout_seed"], "zero_outside": inputs["outside"] == "zero"}
    return Call(**{name: (inputs | made)[name] for name in Call._fields})


NO_BIASES: dict[str, Any] = {"content_bias": None, "position_bias": None}
BIAS_ALONE: dict[str, Any] = {"r": None, "position_bias": None, "r_bias": "H T"}
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
    Case("limited context after the query", causal=False, window=(None, 1), L=9),
    Case("limited context, padded", causal=False, window=(2, 4), M=0, L=9, intervals="padded"),
    Case("two-sided window, causal", window=(2, 3)),
    Case("bidirectional and padded", causal=False, M=0, intervals="padded"),
    Case("random intervals", intervals="random"),
    Case("random intervals, bidirectional", intervals="random", causal=False),
    Case("memory partly filled", intervals="filled"),
    Case("episodes reset inside the segment", intervals="episodes"),
    Case("queries that see nothing", intervals="alternate"),
    Case("dropout", dropout_p=0.3),
    Case("dropout with intervals", dropout_p=0.5, intervals="random", L=7),
    Case("[L, B, H, D] storage", layout="lbhd"),
    Case("fused projections", layout="fused"),
    Case("scale", scale=0.37),
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
    Case("bias beside r", r_bias="H T"),
    Case("bias beside r, dropout, random intervals", r_bias="H T", dropout_p=0.3, intervals="random", scale=-0.5),
    Case("bias alone", **BIAS_ALONE),
    Case("bias alone, bidirectional", **BIAS_ALONE, causal=False, extra_rows=2),
    Case("bias alone, one query", **BIAS_ALONE, L=1, M=9),
    Case("softcap", softcap=0.7),
    Case("softcap of small and large scores", softcap=20.0, scale=3.0, window=5),
    Case("softcap, dropout, negative scale", softcap=1.5, dropout_p=0.4, scale=-0.8, intervals="random", causal=False),
    Case("bias alone, softcap, wide values", **BIAS_ALONE, softcap=2.0, Dv=20, causal=False, intervals="padded"),
    Case("every term, more than a tile", r_bias="H T", softcap=2.0, Dv=5, L=40, M=45, B=1, H=1, causal=False),
    # Of Inkling: position queries, grouped heads, distances outside the table, sinks.
    Case("position queries", Dp=3, **NO_BIASES),
    Case("position queries wider than keys", Dp=40, position_scale=0.7),
    Case("position queries and biases, bidirectional", Dp=16, causal=False, r_bias="H T"),
    Case("position queries, one query", Dp=16, L=1, M=40),
    Case("position queries, decode, wide values", Dp=5, L=3, M=21, Dv=11),
    Case("position scale", position_scale=0.7),
    Case("position scale of a bias alone", **BIAS_ALONE, position_scale=-1.3, scale=0.2),
    Case("position scale near 0", Dp=4, position_scale=1e-30, scale=-0.4),
    Case("distances outside", T=4, zero_row=1, outside="zero"),
    Case("distances outside, bidirectional", T=4, zero_row=2, outside="zero", causal=False, r_bias="H T"),
    Case("distances outside, bias alone", **BIAS_ALONE, T=3, zero_row=0, outside="zero"),
    Case("all distances outside", T=2, zero_row=100, outside="zero", r_bias="H T"),
    Case("distances outside, one query", L=1, M=37, T=5, zero_row=0, outside="zero"),
    Case("distances outside, blocks and tiles", L=110, M=310, B=1, H=1, T=40, zero_row=3, outside="zero",
         Dp=4),
    Case("distances outside, softcap, dropout", T=4, zero_row=0, outside="zero", softcap=1.5, dropout_p=0.3,
         causal=False),
    Case("distances outside, random intervals", T=4, zero_row=3, outside="zero", intervals="random", causal=False),
    Case("grouped heads", H=4, Hkv=2),
    Case("one head of keys", H=3, Hkv=1, M=0, causal=False),
    Case("grouped heads, one query", H=6, Hkv=2, L=1, M=40),
    Case("grouped heads, decode", H=4, Hkv=1, L=3, M=21, Dv=5),
    Case("grouped heads, dropout", H=4, Hkv=2, dropout_p=0.3),
    Case("grouped heads, fused projections, wide values", H=4, Hkv=2, Dv=13, layout="fused"),
    Case("grouped heads, random intervals, bias", H=4, Hkv=2, intervals="random", r_bias="H T", causal=False),
    Case("grouped heads, more than a tile", H=4, Hkv=2, L=53, M=310, B=1),
    Case("sinks", sink="H"),
    Case("sinks of each query", sink="B H L", causal=False),
    Case("sinks, one query", sink="H", L=1, M=9),
    Case("sinks, queries that see nothing", sink="B H L", intervals="alternate"),
    Case("sinks, dropout, softcap", sink="H", dropout_p=0.3, softcap=1.5, causal=False),
    Case("sinks, parts of keys", sink="H", B=1, H=1, L=5, M=1700),
    Case("Inkling", H=6, Hkv=2, Dp=16, D=24, r="1 T Dp", T=7, zero_row=0, outside="zero", **NO_BIASES,
         L=40, M=9, position_scale=1.0, sink="H"),
    Case("Inkling, window", H=4, Hkv=2, Dp=16, D=24, r="1 T Dp", T=5, zero_row=0, outside="zero",
         **NO_BIASES, window=5, position_scale=1.0, scale=1 / 24),
    Case("Inkling, one query", H=6, Hkv=2, Dp=16, D=24, r="1 T Dp", T=7, zero_row=0, outside="zero",
         **NO_BIASES, L=1, M=33, position_scale=1.0, sink="B H L", intervals="start"),
    Case("Inkling, prefix, a table for each batch row", H=4, Hkv=2, Dp=5, r="B 1 T Dp", T=4,
         zero_row=0, outside="zero", prefix=2, window=3, sink="H", position_scale=0.6),
    Case("Inkling, descending, chunks, dropout", H=4, Hkv=2, Dp=5, T=4, zero_row=2, r_descending=True,
         outside="zero", chunk=(3, 1), causal=False, sink="B H L", dropout_p=0.3),
    Case("Inkling, prefix, both bounds, dropout", M=3, L=8, intervals="random", prefix=2, window=(3, 1), dropout_p=0.3,
         causal=False, H=4, Hkv=1, Dp=5, sink="B H L"),
]  # fmt: skip
# Variants that are composed of calls of the kernels.
COMPOSED = [
    Case("no biases, a table of more rows", **NO_BIASES, T=16, zero_row=5),
    Case("clamped", r="1 T Dp", T=4, zero_row=2, **NO_BIASES, outside="clamp", causal=False),
    Case("clamped, descending, causal", T=3, zero_row=1, outside="clamp", r_descending=True),
    Case("clamped by one row", T=1, zero_row=0, outside="clamp", window=(3, 2), causal=False),
    Case("clamped table that is long enough", outside="clamp", causal=False),
    Case("bias for all heads, no biases of queries", r_bias="1 T", **NO_BIASES, D=7),
    Case("bias alone, clamped, descending", **BIAS_ALONE, T=4, zero_row=2, outside="clamp", r_descending=True,
         causal=False),
    Case("bias alone for all heads, prefix, softcap", **BIAS_ALONE | {"r_bias": "1 T"}, Dv=3, prefix=2, window=2,
         softcap=1.5),
    Case("bias and a table for each batch row, chunks", r="B 1 T Dp", r_bias="1 T", M=3, chunk=(2, 1), causal=False),
    Case("chunks that see all before", L=7, M=3, chunk=(3, None), causal=False),
    Case("chunks without context, padded", M=0, L=7, intervals="end", chunk=(3, 0), causal=False),
    Case("chunks with a start", L=7, M=6, intervals="start", chunk=(3, 1), causal=False),
    Case("prefix beyond the segment's start", M=1, L=7, prefix=4),
    Case("prefix of everything", M=1, prefix=7, window=2),
    Case("prefix and padding on the left", M=3, intervals="start", prefix=3, causal=False),
    Case("prefix, both bounds, dropout", M=3, L=8, intervals="random", prefix=2, window=(3, 1), dropout_p=0.3,
         causal=False),
    Case("prefix of an end that hides all", M=0, intervals="end", prefix=1),
    Case("every option", r="1 T Dp", Dv=5, r_bias="H T", T=5, zero_row=2, intervals="random", prefix=3, window=(2, 2),
         outside="clamp", r_descending=True, scale=0.3, softcap=0.8, causal=False),
]  # fmt: skip
# Parts of keys, many heads and batch rows, tiles that end anywhere: against the reference.
TILES = [
    Case("both directions of time", B=2, H=3, L=130, M=210, D=40, intervals="filled", dropout_p=0.1),
    Case("decode", L=3, M=600, D=70),
    Case("narrow heads", B=1, H=1, D=5, L=61),
    Case("parts of keys", B=1, H=1, L=410, M=1800, D=16, intervals="random", dropout_p=0.1),
    Case("keys that no query sees", B=1, H=1, L=40, M=2000, D=16, window=150),
    Case("many heads", B=8, H=4, L=100, M=150, D=8),
    Case("many batch rows", B=40, H=2, L=20, M=50, D=24, intervals="filled", dropout_p=0.1),
    Case("many batch rows, decode", B=70, H=1, L=2, M=90, D=19, intervals="random"),
    Case("decode, many parts of keys", B=1, H=2, L=4, M=1300, D=33, causal=False, window=700),
    Case("wide heads, bidirectional", B=2, H=1, L=100, M=20, D=130, causal=False, intervals="random"),
    Case("groups", B=1, H=6, Hkv=2, L=110, M=700, D=40, Dp=16, T=150, outside="zero", sink="H"),
    Case("groups, decode", H=6, Hkv=2, L=3, M=1300, D=35, Dp=9, T=150, outside="zero", sink="B H L"),
    Case("groups, random intervals", H=4, Hkv=1, L=60, M=330, D=16, Dv=21, Dp=40, intervals="random",
         dropout_p=0.1),
    Case("groups, decode, random intervals", H=5, Hkv=1, L=4, M=700, D=21, Dv=70, intervals="random", r_bias="H T"),
    Case("groups with own tables, parts of keys", B=1, H=4, Hkv=2, L=400, M=900, D=16, causal=False, window=(500, 20)),
]  # fmt: skip
# Arguments to be combined. A backend computes each combination, or refuses it by name.
FEATURES: dict[str, dict[str, Any]] = {
    "wide values": {"Dv": 7},
    "bias": {"r_bias": "H T"},
    "bias alone": BIAS_ALONE | {"r_bias": "1 T"},
    "table for all heads": {"r": "1 T Dp"},
    "table of each batch row": {"r": "B H T Dp"},
    "no batch rows": {"B": 0},
    "no queries": {"L": 0, "M": 0},
    "memory": {"M": 4},
    "bounds": {"intervals": "random"},
    "packed": {"intervals": (2, 0, 3), "B": 1, "L": 5, "M": 0},
    "clamp": {"T": 4, "zero_row": 2, "outside": "clamp"},
    "descending": {"r_descending": True},
    "softcap": {"softcap": 0.7},
    "window": {"window": (2, 1)},
    "chunk": {"chunk": (2, 1), "causal": False},
    "prefix": {"prefix": 2},
    "dropout": {"dropout_p": 0.3},
    "bidirectional": {"causal": False},
    "scale": {"scale": -0.8},
    "position scale": {"position_scale": 0.6},
    "position queries": {"Dp": 3},
    "outside": {"T": 3, "zero_row": 1, "outside": "zero"},
    "grouped heads": {"H": 4, "Hkv": 2},
    "sinks": {"sink": "H"},
}
_EXCLUSIVE = [
    {"bias alone", "position queries"}, {"clamp", "outside"}, {"bias", "bias alone"}, {"packed", "bounds"},
    {"packed", "memory"}, {"packed", "no batch rows"}, {"packed", "no queries"}, {"memory", "no queries"},
    {"prefix", "no queries"},
    *map(set, itertools.combinations(("bias alone", "table for all heads", "table of each batch row"), 2)),
]  # fmt: skip


def compatible(names: tuple[str, ...]) -> bool:
    """Whether no two features set the same argument, or refuse each other."""
    return not any(pair <= set(names) for pair in _EXCLUSIVE)


def composed(names: tuple[str, ...], **sizes: Any) -> Case:
    """Return the case with these features."""
    fields = {n: x for name in names for n, x in FEATURES[name].items()}
    return Case(", ".join(names), **{"L": 5, "M": 0, "D": 4} | sizes | fields)


PAIRS = [composed(pair) for pair in itertools.combinations(FEATURES, 2) if compatible(pair)]
BY_NAME = {case.name: case for case in CASES + TERMS + COMPOSED}
