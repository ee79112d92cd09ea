"""Intervals of masks, and the weights themselves."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Case, make_inputs
from torch import Tensor

from txl_kernels import bounds, intervals, rel_attention, rel_attention_weights


def interval_of(row: list[bool]) -> tuple[int, int, bool]:
    """First visible key, one past the last, whether one between is hidden."""
    seen = [j for j, x in enumerate(row) if x]
    return (seen[0], seen[-1] + 1, len(seen) < seen[-1] + 1 - seen[0]) if seen else (0, 0, False)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_scan_by_definition(data: st.DataObject) -> None:
    batch, length, keys = (data.draw(st.integers(low, 5)) for low in (1, 1, 0))
    bits = data.draw(st.lists(st.booleans(), min_size=batch * length * keys, max_size=batch * length * keys))
    visible = data.draw(st.booleans())
    mask = torch.tensor(bits, dtype=torch.bool).view(batch, length, keys)
    if data.draw(st.booleans()):
        mask = mask.transpose(1, 2).contiguous().transpose(1, 2)  # keys are not contiguous
    want = [interval_of((row == visible).tolist()) for row in mask.flatten(0, 1)]
    for function in (bounds._on_cpu, bounds._in_torch):
        start, end, hole = function(mask, visible)
        assert (start.flatten().tolist(), end.flatten().tolist()) == ([w[0] for w in want], [w[1] for w in want])
        assert int(hole) == next((n for n, w in enumerate(want) if w[2]), -1)
        assert start.dtype == end.dtype == torch.int32


def test_bytes_that_are_no_bools() -> None:
    """Whatever is not 0 is True."""
    mask = torch.tensor([[0, 2, 2, 0]], dtype=torch.uint8).view(torch.bool)
    assert [x.tolist() for x in intervals(mask, visible=True)] == [[[1]], [[3]]]


def test_shapes() -> None:
    padding = torch.tensor([[True, True, False], [False, True, True]])
    want = (torch.tensor([[0], [1]]), torch.tensor([[2], [3]]))
    for mask in (
        padding,
        padding[:, None],
        padding[:, None].expand(2, 7, 3),
        padding[:, None, None].expand(2, 1, 7, 3),
    ):
        assert all(torch.equal(a, b) for a, b in zip(intervals(mask, visible=True), want, strict=True))
    assert intervals(padding[:, None].repeat(1, 7, 1), visible=True)[0].shape == (2, 7)
    assert [x.tolist() for x in intervals(~padding, visible=False)] == [x.tolist() for x in want]


def test_a_hole_is_named() -> None:
    mask = torch.ones(3, 2, 5, dtype=torch.bool)
    mask[1, 1, 2] = False
    with pytest.raises(ValueError, match=r"mask must hide no key between visible ones .*for text 1, query 1"):
        intervals(mask, visible=True)
    assert intervals(mask, visible=True, check=False)[1].tolist() == [[5, 5]] * 3
    compiled = torch.compile(functools.partial(intervals, visible=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(mask[:1])[1], torch.full((1, 2), 5))
    with pytest.raises(RuntimeError, match="mask has a hidden key between visible ones"):
        compiled(mask)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(2, 3), TypeError, "mask must be a bool tensor, got torch.float32; for an additive mask .* mask == 0"),
        (None, TypeError, "mask must be a bool tensor, got NoneType"),
        (torch.ones(3).bool(), ValueError, r"mask must be \[B, S\], .* got shape \[3\]"),
        (torch.ones(2, 2, 3, 3).bool(), ValueError, r"got shape \[2, 2, 3, 3\]"),
    ],
    ids=["floats", "none", "one axis", "a mask each head"],
)  # fmt: skip
def test_refused(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        intervals(mask, visible=True)


def test_which_value_is_visible_must_be_said() -> None:
    """torch's own modules hide True, `scaled_dot_product_attention` shows it."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'visible'"):
        intervals(mask)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="visible must be True or False, got Tensor"):
        intervals(mask, visible=mask)  # type: ignore[arg-type]


@torch.no_grad()
def test_torchs_key_padding_mask() -> None:
    """Without positions our scores are those of torch's own module, mask included."""
    theirs = torch.nn.MultiheadAttention(16, 2, bias=False, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    key_padding_mask = torch.tensor([[False] * 5, [False, False, False, True, True]])
    want, _ = theirs(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)
    q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (x @ theirs.in_proj_weight.T).chunk(3, -1))
    start, end = intervals(key_padding_mask, visible=False)
    out = rel_attention(q, k, v, torch.zeros(2, 9, 8), causal=False, zero_row=4, start=start, end=end)
    torch.testing.assert_close(theirs.out_proj(out.transpose(1, 2).flatten(2)), want)


def test_operator() -> None:
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    torch.library.opcheck(torch.ops.txl_kernels.intervals.default, (mask, True))


@pytest.mark.parametrize(
    "case", [Case("causal"), Case("both", causal=False, intervals="random"), Case("none", M=0)], ids=str
)
def test_weights_of_values_that_tell_keys_apart(case: Case) -> None:
    """With the identity for values, the output is the weights."""
    x = make_inputs(case)
    keys = case.S
    names = ("q", "k", "r", "content_bias", "position_bias")
    given = {n: x[n] for n in ("causal", "window", "start", "end", "zero_row")}
    eye = torch.eye(keys, dtype=torch.float64).expand(case.B, case.H, keys, keys)
    memory = (x["k_mem"], eye[:, :, : case.M])
    tensors = {n: x[n] for n in names}
    want = rel_attention(**tensors, v=eye[:, :, case.M :], memory=memory, backend="reference", **given)
    got = rel_attention_weights(**tensors, k_mem=x["k_mem"], **given)
    torch.testing.assert_close(got, want)
    rows = torch.tensor([4, 0, -1])
    torch.testing.assert_close(rel_attention_weights(**tensors, k_mem=x["k_mem"], rows=rows, **given), want[:, :, rows])


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.tensor([6]), ValueError, "rows must be queries from -6 to 5, got values from 6 to 6"),
        ([1], TypeError, r"rows must be None or an int64 tensor \[R\] on cpu, got list"),
    ],
    ids=["beyond", "a list"],
)
def test_rows_refused(rows: Any, error: type[Exception], message: str) -> None:
    x = make_inputs(Case(""))
    tensors: dict[str, Tensor] = {n: x[n] for n in ("q", "k", "r", "k_mem")}
    with pytest.raises(error, match=message):
        rel_attention_weights(**tensors, rows=rows)
