"""The definition, computed pair by pair: no shift, no matrix product of scores, float64. And inputs
to try it on."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from txl_kernels.backends import KERNELS
from txl_kernels.call import INPUTS, Call, keep_mask, keep_scale
from txl_kernels.checks import span

TENSORS = tuple(name for name in INPUTS if name != "r_bias")  # of a call as the paper's is
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
    tables: str = "r"  # or r_bias, or both
    softcap: float = 0.0
    causal: bool = True
    window: int | tuple[int | None, int | None] | None = None
    intervals: str = ""  # "", random, padded, filled, episodes, empty, nothing, ended
    dropout_p: float = 0.0
    layout: str = "bhld"  # or lbhd, fused
    scale: float | None = None
    extra_rows: int = 0  # rows of r beyond those needed
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def S(self) -> int:
        return self.M + self.L

    @property
    def zero_row(self) -> int:
        return 0 if self.causal else max(self.L - 1, 0)


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
MORE_TERMS = [
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

    if case.intervals == "random":
        return draw(0, S, B, L), draw(0, S, B, L)
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
    require gradients. `r_bias` is there where the case has it; r and position_bias may be None."""
    g = torch.Generator("cpu").manual_seed(case.seed)
    B, H, L, M, D, Dv = case.B, case.H, case.L, case.M, case.D, case.Dv or case.D
    left = case.window[0] if isinstance(case.window, tuple) else case.window and case.window - 1
    reach = case.S if left is None else min(case.S, left + 1)
    rows = (reach if case.causal else reach + case.zero_row) + case.extra_rows
    widths = {"q": D, "k": D, "v": Dv}
    tensors = {name: _stored((B, H, L, n), case.layout, g) for name, n in widths.items()}
    tensors["r"] = randn(H, rows, D, generator=g)
    tensors |= {name: randn(H, D, generator=g) for name in ("content_bias", "position_bias")}
    tensors |= {name: _stored((B, H, M, n), case.layout, g) for name, n in (("k_mem", D), ("v_mem", Dv))}
    absent: dict[str, Any] = {}
    if case.tables != "r":
        tensors["r_bias"] = randn(rows, H, generator=g).t()
    if case.tables == "r_bias":
        absent = dict.fromkeys(("r", "position_bias"))
    start, end = intervals_of(case, g)
    given: dict[str, Any] = {"start": start, "end": end, "causal": case.causal, "window": case.window}
    given |= {"zero_row": case.zero_row, "scale": case.scale, "dropout_p": case.dropout_p, "softcap": case.softcap}
    if case.dropout_p:
        given["dropout_seed"] = torch.tensor([-(2**62) + 12345])
    return given | cast(tensors, dtype) | absent


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
    given = {name: x for name, x in inputs.items() if name in Call._fields}
    bounds = {name: None if inputs[name] is None else inputs[name].expand(B, L) for name in ("start", "end")}
    scale = D**-0.5 if inputs["scale"] is None else inputs["scale"]
    given["ahead"], given["window"] = span(inputs["causal"], inputs["window"])
    if given["position_bias"] is None:
        given["position_bias"] = inputs["q"].new_zeros(H, D)
    given = {"r_bias": None} | given | bounds | {"scale": scale, "seed": inputs.get("dropout_seed")}
    return Call(**given)


def oracle(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) of `make_inputs`' arguments, by a double loop over queries and keys."""
    q, k, v = x["q"], torch.cat([x["k_mem"], x["k"]], 2), torch.cat([x["v_mem"], x["v"]], 2)
    B, H, L, D = q.shape
    M, S = x["k_mem"].size(2), k.size(2)
    scale = D**-0.5 if x["scale"] is None else x["scale"]
    keep = torch.ones(B, H, L, S, dtype=torch.float64)
    if x["dropout_p"]:
        keep = keep_mask(x["dropout_seed"], B, H, L, S, x["dropout_p"]).double() * keep_scale(x["dropout_p"])
    out, lse = q.new_zeros(B, H, L, v.size(3)), q.new_full((B, H, L), -torch.inf)
    rows_out, rows_lse = [], []
    for b in range(B):
        for i in range(L):
            seen = [j for j in range(S) if sees(x, b, i, j, M)]
            if not seen:
                rows_out.append(out[b, :, i])
                rows_lse.append(lse[b, :, i])
                continue
            score = torch.stack([scale * _score(x, q[b, :, i], k[b, :, j], M + i - j) for j in seen], -1)
            if x["softcap"]:
                score = x["softcap"] * torch.tanh(score / x["softcap"])
            p = score.softmax(-1) * keep[b, :, i, seen]
            rows_out.append((p.unsqueeze(-1) * v[b][:, seen]).sum(1))
            rows_lse.append(score.logsumexp(-1))
    if not rows_out:
        return out, lse
    return torch.stack(rows_out).view(B, L, H, -1).transpose(1, 2), torch.stack(rows_lse).view(B, L, H).transpose(1, 2)


def _score(x: dict[str, Any], q: Tensor, k: Tensor, distance: int) -> Tensor:
    """[H], before the scale; q, k: [H, D]."""
    row = x["zero_row"] + distance
    score = (q * k).sum(-1) + (x["content_bias"] * k).sum(-1)
    if x["r"] is not None:
        score = score + (q * x["r"][:, row]).sum(-1) + (x["position_bias"] * x["r"][:, row]).sum(-1)
    if "r_bias" in x:
        score = score + x["r_bias"][:, row]
    return score


def sees(x: dict[str, Any], b: int, i: int, j: int, M: int) -> bool:
    """Whether query i of batch row b sees key j."""
    at = M + i
    left, right = x["window"] if isinstance(x["window"], tuple) else (x["window"] and x["window"] - 1, None)
    ok = (left is None or at - j <= left) and (right is None or j - at <= right) and (not x["causal"] or j <= at)
    for name, test in (("start", lambda bound: j >= bound), ("end", lambda bound: j < bound)):
        if x[name] is not None:
            bound = x[name].expand(x["q"].size(0), x["q"].size(2))
            ok = ok and test(int(bound[b, i]))
    return ok


def gradients(out: Tensor, lse: Tensor, x: dict[str, Any], *, through_lse: bool = True) -> dict[str, Tensor]:
    """Gradients of a fixed random functional of out and lse in all tensors that the call has."""
    g = torch.Generator("cpu").manual_seed(7)
    weight = randn(*out.shape, generator=g).to(out.device)
    loss = (out.double() * weight).sum()
    if through_lse:
        weight = randn(*lse.shape, generator=g).to(out.device)
        loss = loss + (torch.where(lse.isfinite(), lse, 0.0).double() * weight).sum()
    names = [name for name in INPUTS if x.get(name) is not None]
    return dict(zip(names, torch.autograd.grad(loss, [x[name] for name in names], allow_unused=True), strict=True))


@contextlib.contextmanager
def skipping_refusals(backend: Any) -> Iterator[None]:
    """Skips the test where a backend refuses a call by name, as it may a term of the formula."""
    try:
        yield
    except RuntimeError as error:
        if f"{backend} does not take" not in str(error):
            raise
        pytest.skip(str(error))


def require_takes(backend: str, call: Call) -> None:
    """Skips the test where a backend refuses such a call, which it has to by name."""
    reason = KERNELS[backend].refuses(call) if backend in KERNELS else None
    if reason is not None:
        assert f"{backend} does not take" in reason
        pytest.skip(reason)
