"""The definition of the attention, pair by pair in float64: no shift, no matrix product of scores.
And the comparisons with it."""

import functools
from typing import Any

import pytest
import torch
from cases import DTYPES, Case, as_call, as_fields, in_float64, leaves, make_inputs, randn
from tolerances import require_close, require_small_error
from torch import Tensor

from txl_kernels import rel_attention
from txl_kernels.call import intervals, keep_mask, keep_scale


def oracle(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of `make_inputs`' arguments, query by query over the keys that it sees."""
    q, k, v = x["q"], torch.cat([x["k_mem"], x["k"]], 2), torch.cat([x["v_mem"], x["v"]], 2)
    B, H, L, D = q.shape
    M, S = x["k_mem"].size(2), k.size(2)
    heads = [h // (H // k.size(1)) for h in range(H)]
    k, v = k[:, heads], v[:, heads]
    q_pos = q if x["q_pos"] is None else x["q_pos"]
    scale = D**-0.5 if x["scale"] is None else x["scale"]
    position_scale = scale if x["position_scale"] is None else x["position_scale"]
    u = q.new_zeros(H, D) if x["content_bias"] is None else x["content_bias"]
    w = q.new_zeros(H, q_pos.size(3)) if x["position_bias"] is None else x["position_bias"]
    each_row = x["r"] is not None and x["r"].dim() == 4
    outs, sums = [], []
    for b in range(B):
        r = None if x["r"] is None else (x["r"].expand(B, -1, -1, -1)[b] if each_row else x["r"]).expand(H, -1, -1)
        keep = _keep_factors(x, b, each_row, (B, H, L, S))
        for i in range(L):
            seen = [j for j in range(S) if sees(x, b, i, j, M)]
            rows = [_row(x, M + i - j) for j in seen]
            inside = torch.tensor([row is not None for row in rows])
            rows = [0 if row is None else row for row in rows]
            score = scale * ((q[b, :, i, None] + u[:, None]) * k[b, :, seen]).sum(-1)
            position = torch.zeros_like(score)
            if r is not None:
                position = position + ((q_pos[b, :, i, None] + w[:, None]) * r[:, rows]).sum(-1)
            if x["r_bias"] is not None:
                position = position + x["r_bias"][:, rows]
            score = score + position_scale * position * inside
            if x["softcap"]:
                score = x["softcap"] * torch.tanh(score / x["softcap"])
            p = score.softmax(-1)
            if x["sink"] is not None and seen:
                sink = (x["sink"] if x["sink"].dim() == 1 else x["sink"][b, :, i])[:, None]
                p = torch.cat([score, sink], -1).softmax(-1)[:, :-1]
            p = p * keep[:, i, seen]
            outs.append((p[..., None] * v[b, :, seen]).sum(1))
            sums.append(score.logsumexp(-1))
    if not outs:  # the sums of nothing, to which every tensor belongs
        nothing = 0.0 * sum(y.sum() for y in leaves(x).values())
        return q.new_zeros(B, H, L, v.size(3)) + nothing, q.new_zeros(B, H, L) + nothing
    return torch.stack(outs).view(B, L, H, -1).transpose(1, 2), torch.stack(sums).view(B, L, H).transpose(1, 2)


def sees(x: dict[str, Any], b: int, i: int, j: int, M: int) -> bool:
    """Whether query i of batch row b sees key j."""
    if j < x["prefix"]:
        return True
    at, L = M + i, x["q"].size(2)
    left, right = x["window"] if isinstance(x["window"], tuple) else (x["window"] and x["window"] - 1, None)
    ok = (left is None or at - j <= left) and (right is None or j - at <= right) and (not x["causal"] or j <= at)
    if x["chunk"] is not None:
        size, before = x["chunk"]
        own, other = i // size, (j - M) // size  # chunks before the segment have numbers below 0
        ok = ok and other <= own and (before is None or other >= own - before)
    for name, test in (("start", lambda bound: j >= bound), ("end", lambda bound: j < bound)):
        if ok and x[name] is not None:
            ok = test(int(x[name].expand(x["q"].size(0), L)[b, i]))
    return ok


def _row(x: dict[str, Any], distance: int) -> int | None:
    """The row of r and r_bias; None for a distance without one."""
    rows = x["r_bias"].size(1) if x["r"] is None else x["r"].size(-2)
    row = x["zero_row"] + (-distance if x["r_descending"] else distance)
    row = min(max(row, 0), rows - 1) if x["outside"] == "clamp" else row
    if x["outside"] == "zero" and not 0 <= row < rows:
        return None
    assert 0 <= row < rows
    return int(row)


def _keep_factors(x: dict[str, Any], b: int, each_row: bool, shape: tuple[int, ...]) -> Tensor:
    """Factors [H, L, S] of the weights of batch row b: 0 where dropped."""
    if not x["dropout_p"]:
        return torch.ones(shape[1:], dtype=torch.float64)
    seed = x["dropout_seed"] + b if each_row else x["dropout_seed"]
    return keep_mask(seed, *shape, x["dropout_p"])[0 if each_row else b].double() * keep_scale(x["dropout_p"])


def gradients(
    out: Tensor, lse: Tensor, x: dict[str, Any], *, through_lse: bool = True, again: bool = False
) -> dict[str, Tensor]:
    """Gradients of a fixed random functional of out and lse in all tensors that require them.
    again: keeps what backward needs."""
    g = torch.Generator("cpu").manual_seed(7)
    loss = (out.double() * randn(*out.shape, generator=g).to(out.device)).sum()
    if through_lse:
        weight = randn(*lse.shape, generator=g).to(out.device)
        loss = loss + (torch.where(lse.isfinite(), lse, 0.0).double() * weight).sum()
    tensors = leaves(x)
    return dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values()), retain_graph=again), strict=True))


def attend(inputs: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of `make_inputs`' arguments; skip the test if the backend refuses a term by
    name."""
    try:
        return rel_attention(**as_call(inputs), return_lse=True, **more)
    except RuntimeError as error:
        if f"{more.get('backend')} does not take" not in str(error):
            raise
        pytest.skip(str(error))


@functools.lru_cache(256)  # backends, instruction sets and units are compared with the same values
def _by_definition(case: Case, device: torch.device, grad: bool) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Return out, lse, and the gradients without and with one of lse.

    device: the default one, where the inputs are. grad: whether gradients are enabled.
    """
    exact = make_inputs(case)
    out, lse = oracle(exact)
    found = [gradients(out, lse, exact, through_lse=way, again=True) for way in (False, True) if grad]
    return out.detach(), lse.detach(), found


def matches_the_definition(case: Case, backend: str, dtype: torch.dtype | None = None) -> None:
    """Compare out, lse and, where they are enabled, gradients with and without one of lse.

    dtype: None for the backend's in DTYPES.
    """
    x = make_inputs(case, dtype or DTYPES[backend])
    got = attend(x, backend=backend)
    out, lse, wanted = _by_definition(case, torch.get_default_device(), torch.is_grad_enabled())
    require_close(got[0], out, "out")
    require_close(got[1], lse, "lse")
    for through_lse, want in enumerate(wanted):
        given = gradients(*got, x, through_lse=bool(through_lse), again=not through_lse)
        for name in want:
            require_close(given[name], want[name], f"gradient of {name}")


def _results(x: dict[str, Any], backend: str | None) -> dict[str, Tensor]:
    out, lse = attend(x, backend=backend)
    return {"out": out, "lse": lse} | (gradients(out, lse, x) if out.requires_grad else {})


@functools.lru_cache(64)
def _by_reference(case: Case, dtype: torch.dtype, device: torch.device, grad: bool) -> dict[str, Tensor]:
    """Return the reference's results in float64 for inputs rounded to dtype. device, grad: as in
    `_by_definition`."""
    found = _results(in_float64(make_inputs(case, dtype)), "reference")
    return {name: x.detach() for name, x in found.items()}


def matches_the_reference(
    case: Case, dtype: torch.dtype, backend: str | None, *, minimum: float | None = None, of_biases: int = 10
) -> tuple[Tensor, Tensor]:
    """Compare out, lse and, where they are enabled, gradients with the reference in float64, which
    the definition proves. Return both values of out.

    minimum: None to compare norms alone, else as `require_close` takes it. of_biases: the factor of
    the tolerance of gradients of biases.
    """
    given = _results(make_inputs(case, dtype), backend)
    wanted = _by_reference(case, dtype, torch.get_default_device(), torch.is_grad_enabled())
    for name in wanted:
        require_small_error(given[name], wanted[name], name, dtype, of_biases)
        if minimum is not None:
            require_close(given[name], wanted[name], name, dtype, minimum=minimum)
    return given["out"], wanted["out"]


def spoiled(x: dict[str, Any]) -> dict[str, Any]:
    """Return `make_inputs`' arguments with NaN in all rows that no result depends on: keys and
    values that no query sees, rows of r at distances that no pair has, queries that see nothing."""
    call, memory_len = as_fields(x), x["k_mem"].size(2)
    low, high = intervals(call)
    keys = torch.arange(memory_len + x["q"].size(2))
    sees = ((keys >= low[..., None]) & (keys < high[..., None])).expand(x["q"].size(0), -1, -1)  # [B, L, S]
    distances = (torch.arange(x["q"].size(2)) + memory_len)[:, None] - keys
    used = torch.zeros(x["r"].size(1), dtype=torch.bool).index_fill_(0, (distances[sees.any(0)] + x["zero_row"]), True)
    seen = sees.any(1)[:, None, :, None]
    hidden = {"q": ~sees.any(2)[:, None, :, None], "r": ~used[:, None]}
    hidden |= dict.fromkeys("kv", ~seen[:, :, memory_len:]) | {f"{n}_mem": ~seen[:, :, :memory_len] for n in "kv"}
    assert any(rows.any() for rows in hidden.values())
    return x | {n: x[n].detach().masked_fill(rows, torch.nan).requires_grad_() for n, rows in hidden.items()}


def ignores_what_no_query_sees(
    case: Case, dtype: torch.dtype, backend: str, bounds: dict[str, Tensor] | None = None, *, exactly: bool = True
) -> None:
    """Check that out, lse and gradients (where needed) do not depend on hidden rows.

    bounds: start and end in place of the case's. exactly: the same bits.
    """
    device = torch.get_default_device()  # bounds were made where the tests were collected
    clean = make_inputs(case, dtype) | {n: x.to(device) for n, x in (bounds or {}).items()}
    results = [_results(x, backend) for x in (clean, spoiled(clean))]
    for name, want in results[0].items():
        assert want.isfinite().all() or name == "lse", name
        tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {}
        torch.testing.assert_close(results[1][name], want, **tolerance, msg=lambda text, n=name: f"{n}: {text}")
