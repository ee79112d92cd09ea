"""Every form of the attention by its definition, pair by pair, in float64; and inputs to try it
on."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import DTYPES, cast, randn, skipping_refusals
from torch import Tensor

from txl_kernels import bounds_from_cu_seqlens, rel_attention
from txl_kernels.call import keep_mask, keep_scale

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@dataclass(frozen=True)
class FormCase:
    """One call: sizes and settings. `str(case)` is its test id."""

    name: str
    B: int = 2
    H: int = 2
    L: int = 6
    M: int = 5
    D: int = 8
    Dv: int = 8
    r: tuple[int, ...] | None = (2,)  # leading axes
    rows: int = 0  # of r; 0 for those needed
    zero_row: int = -1  # -1 for the row that L - 1 distances ahead leave
    biases: bool = True
    numbers: int = 0  # heads of r_bias; 0 for none
    start: bool = False
    end: bool = False
    packed: tuple[int, ...] = ()  # lengths of texts in one row
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


BOTH = {"causal": False}
FORMS = [
    FormCase("no biases", biases=False),
    FormCase("descending", settings={"r_descending": True} | BOTH),
    FormCase("descending, causal, no memory", M=0, settings={"r_descending": True}),
    FormCase("a table for all heads", r=(1,)),
    FormCase("clamped", r=(1,), rows=4, zero_row=2, biases=False, settings={"clamp": True} | BOTH),
    FormCase("clamped, descending, causal", rows=3, zero_row=1, settings={"clamp": True, "r_descending": True}),
    FormCase("clamped by one row", rows=1, zero_row=0, settings={"clamp": True, "window": (3, 2)} | BOTH),
    FormCase("clamped table that is long enough", settings={"clamp": True} | BOTH),
    FormCase("a number each distance", numbers=2),
    FormCase("numbers for all heads, no biases", numbers=1, biases=False, D=7, Dv=7),
    FormCase("numbers, clamped, descending", numbers=2, rows=4, zero_row=2, r=(1,),
             settings={"clamp": True, "r_descending": True} | BOTH),
    FormCase("numbers alone, clamped, descending", r=None, numbers=2, rows=4, zero_row=2,
             settings={"clamp": True, "r_descending": True} | BOTH),
    FormCase("numbers alone for all heads, prefix, softcap", r=None, numbers=1, Dv=3,
             settings={"prefix": 2, "window": 2, "softcap": 1.5}),
    FormCase("numbers and a table for each text, chunks", r=(2, 1), numbers=1, M=3, settings={"chunk": (2, 1)} | BOTH),
    FormCase("narrow values", Dv=3),
    FormCase("wide values", Dv=13, D=5, M=0),
    FormCase("wide values, numbers, no biases", Dv=20, numbers=2, biases=False),
    FormCase("a table for each text", r=(2, 2)),
    FormCase("a table for each text and all heads", r=(2, 1), start=True, settings=BOTH),
    FormCase("tables for each text, dropout", r=(2, 2), settings={"dropout_p": 0.4}),
    FormCase("chunks", M=0, L=11, settings={"chunk": (3, 1)} | BOTH),
    FormCase("chunks after memory", M=4, L=7, settings={"chunk": (2, 2)} | BOTH),
    FormCase("chunks that see all before", L=7, M=3, settings={"chunk": (3, None)} | BOTH),
    FormCase("chunks without context, padded", M=0, L=7, end=True, settings={"chunk": (3, 0)} | BOTH),
    FormCase("chunks with a start", L=7, M=6, start=True, settings={"chunk": (3, 1)} | BOTH),
    FormCase("prefix of a window", settings={"prefix": 2, "window": 3}),
    FormCase("prefix beyond the segment's start", M=1, L=7, settings={"prefix": 4}),
    FormCase("prefix of everything", M=1, settings={"prefix": 7, "window": 2}),
    FormCase("prefix and padding on the left", M=3, start=True, settings={"prefix": 3} | BOTH),
    FormCase("prefix, both bounds, dropout", M=3, L=8, start=True, end=True,
             settings={"prefix": 2, "window": (3, 1), "dropout_p": 0.3} | BOTH),
    FormCase("prefix, narrow values, numbers", Dv=4, numbers=2, settings={"prefix": 2, "window": 2}),
    FormCase("prefix of an end that hides all", M=0, end=True, settings={"prefix": 1}),
    FormCase("all at once", r=(1,), Dv=5, numbers=2, rows=5, zero_row=2, start=True, end=True,
             settings={"prefix": 3, "window": (2, 2), "clamp": True, "r_descending": True, "scale": 0.3, "softcap": 0.8,
                       "causal": False}),
]  # fmt: skip


def make_form(case: FormCase, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of `rel_attention`, the memory as `k_mem` and `v_mem`; leaves that require
    gradients."""
    g = torch.Generator("cpu").manual_seed(3)
    B, H, L, M = case.B, case.H, case.L, case.M
    rows = case.rows or M + 2 * L - 1
    zero_row = case.zero_row
    if zero_row < 0:
        zero_row = M + L - 1 if case.settings.get("r_descending") else L - 1
    x = {"q": randn(B, H, L, case.D, generator=g), "k": randn(B, H, L, case.D, generator=g)}
    x |= {"v": randn(B, H, L, case.Dv, generator=g)}
    if case.r is not None:
        x["r"] = randn(*case.r, rows, case.D, generator=g)
    x |= {"k_mem": randn(B, H, M, case.D, generator=g), "v_mem": randn(B, H, M, case.Dv, generator=g)}
    if case.biases:
        names = ("content_bias", "position_bias")[: 2 if "r" in x else 1]
        x |= {name: randn(H, case.D, generator=g) for name in names}
    if case.numbers:
        x["r_bias"] = randn(case.numbers, rows, generator=g)
    given: dict[str, Any] = {"zero_row": zero_row, **case.settings}
    for name in ("start", "end"):
        if getattr(case, name):
            bound = torch.randint(0, M + L + 1, (B, L), generator=g, dtype=torch.int32, device="cpu")
            given[name] = bound.to(torch.get_default_device())
    if case.packed:
        ends = torch.tensor([0, *itertools.accumulate(case.packed)])
        given["start"], given["end"] = (x + M for x in bounds_from_cu_seqlens(ends, L))
    if given.get("dropout_p"):
        given["dropout_seed"] = torch.tensor([991])
    return given | {"r": None} | cast(x, dtype)


def leaves(x: dict[str, Any]) -> dict[str, Tensor]:
    return {name: y for name, y in x.items() if isinstance(y, Tensor) and y.requires_grad}


def form_oracle(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) of `make_form`'s arguments, by a double loop over queries and keys."""
    q, k, v = x["q"], torch.cat([x["k_mem"], x["k"]], 2), torch.cat([x["v_mem"], x["v"]], 2)
    B, H, L, D = q.shape
    M, S = x["k_mem"].size(2), k.size(2)
    scale = x.get("scale") or D**-0.5
    zero = q.new_zeros(H, D)
    u, w = x.get("content_bias", zero), x.get("position_bias", zero)
    each_text = x["r"] is not None and x["r"].dim() == 4
    rows = x["r_bias"].size(1) if x["r"] is None else x["r"].size(-2)
    outs, sums = [], []
    for b in range(B):
        table = q.new_zeros(H, rows, D)
        if x["r"] is not None:
            table = x["r"].expand(B, -1, -1, -1)[b].expand(H, -1, -1) if each_text else x["r"].expand(H, -1, -1)
        keep = torch.ones(H, L, S, dtype=torch.float64)
        if x.get("dropout_p"):
            seed = x["dropout_seed"] + b if each_text else x["dropout_seed"]
            drawn = keep_mask(seed, B, H, L, S, x["dropout_p"])[0 if each_text else b]
            keep = drawn.double() * keep_scale(x["dropout_p"])
        for i in range(L):
            scores, values = [], []
            for j in (j for j in range(S) if sees(x, b, i, j, M)):
                distance = M + i - j
                row = x["zero_row"] + (-distance if x.get("r_descending") else distance)
                if x.get("clamp"):
                    row = min(max(row, 0), rows - 1)
                assert 0 <= row < rows
                score = ((q[b, :, i] + u) * k[b, :, j]).sum(-1) + ((q[b, :, i] + w) * table[:, row]).sum(-1)
                if "r_bias" in x:
                    score = score + x["r_bias"][:, row]
                score = scale * score
                if x.get("softcap"):
                    score = x["softcap"] * torch.tanh(score / x["softcap"])
                scores.append(score)
                values.append((v[b, :, j], keep[:, i, j]))
            if not scores:
                outs.append(v.new_zeros(H, v.size(-1)))
                sums.append(v.new_full((H,), -torch.inf))
                continue
            score = torch.stack(scores, -1)
            p = score.softmax(-1) * torch.stack([kept for _, kept in values], -1)
            outs.append((p.unsqueeze(-1) * torch.stack([value for value, _ in values], 1)).sum(1))
            sums.append(score.logsumexp(-1))
    return torch.stack(outs).view(B, L, H, -1).transpose(1, 2), torch.stack(sums).view(B, L, H).transpose(1, 2)


def sees(x: dict[str, Any], b: int, i: int, j: int, M: int) -> bool:
    """Whether query i of text b sees key j."""
    if j < x.get("prefix", 0):
        return True
    at, window, ok = M + i, x.get("window"), True
    if isinstance(window, tuple):
        ok = at - j <= window[0] and j - at <= window[1]
    elif window is not None:
        ok = at - j < window
    if x.get("causal", True):
        ok = ok and j <= at
    if "chunk" in x:
        size, left = x["chunk"]
        own, other = i // size, (j - M) // size  # chunks before the segment have numbers below 0
        ok = ok and other <= own and (left is None or other >= own - left)
    if "start" in x:
        ok = ok and j >= int(x["start"][b, i])
    if "end" in x:
        ok = ok and j < int(x["end"][b, i])
    return ok


def attend(x: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
    given = {name: y for name, y in x.items() if name not in ("k_mem", "v_mem")}
    out, lse = rel_attention(**given, memory=(x["k_mem"], x["v_mem"]), return_lse=True, **more)
    return out, lse


def call(x: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
    """Skips the test where the backend refuses what a form leaves."""
    with skipping_refusals(more.get("backend")):
        return attend(x, **more)


def gradients(out: Tensor, lse: Tensor, x: dict[str, Any]) -> dict[str, Tensor]:
    g = torch.Generator("cpu").manual_seed(7)
    loss = (out.double() * randn(*out.shape, generator=g)).sum()
    loss = loss + (lse.where(lse.isfinite(), 0.0).double() * randn(*lse.shape, generator=g)).sum()
    tensors = leaves(x)
    found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return {n: torch.zeros_like(x[n]) if y is None else y for n, y in zip(tensors, found, strict=True)}


def close(got: Tensor, want: Tensor, what: str) -> None:
    want = want.detach()
    size = float(want.where(want.isfinite(), 0.0).abs().amax()) if want.numel() else 0.0
    torch.testing.assert_close(
        got.detach().double(), want, rtol=0, atol=TOLERANCE[got.dtype] * max(1.0, size),
        msg=lambda m: f"{what}: {m}",
    )  # fmt: skip


def matches_the_definition(case: FormCase, backend: str) -> None:
    """out, lse and every gradient, against the double loop."""
    x, exact = make_form(case, DTYPES[backend]), make_form(case)
    out, lse = call(x, backend=backend)
    want_out, want_lse = form_oracle(exact)
    close(out, want_out, "out")
    close(lse, want_lse, "lse")
    got, want = gradients(out, lse, x), gradients(want_out, want_lse, exact)
    for name in want:
        close(got[name], want[name], f"gradient of {name}")
