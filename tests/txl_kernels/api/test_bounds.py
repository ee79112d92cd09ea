"""Bounds made from masks, ends of episodes, lengths and packed sequences."""

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from txl_kernels import (
    bounds,
    bounds_from_cu_seqlens,
    end_from_lengths,
    intervals,
    rel_attention,
    start_from_done,
    start_from_lengths,
)


@pytest.mark.parametrize("memory_len", [0, 7])
@pytest.mark.parametrize("with_memory", [False, True])
def test_queries_see_their_own_episode(memory_len: int, with_memory: bool) -> None:
    """The episodes are counted step by step."""
    done, memory_done = torch.rand(5, 9) < 0.3, torch.rand(5, memory_len) < 0.3
    start = start_from_done(done, memory_len, memory_done if with_memory else None)
    assert (start.dtype, start.shape) == (torch.int32, (5, 9))
    flags = torch.cat([memory_done if with_memory else torch.zeros_like(memory_done), done], 1)
    for b in range(5):
        episode, episodes = 0, []
        for ended in flags[b].tolist():
            episodes.append(episode)
            episode += ended
        for i in range(9):
            seen = [j for j in range(memory_len + i + 1) if j >= start[b, i]]
            assert seen == [j for j in range(memory_len + i + 1) if episodes[j] == episodes[memory_len + i]]


def test_no_steps() -> None:
    assert start_from_done(torch.zeros(2, 0, dtype=torch.bool), 3).shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [0, 3])
def test_positions_see_their_own_packed_sequence(dtype: torch.dtype, padding: int) -> None:
    ends = [0, 7, 8, 8, 20, 25]
    start, end = bounds_from_cu_seqlens(torch.tensor(ends, dtype=dtype), 25 + padding)
    assert start.dtype == end.dtype == torch.int32
    want = [pair for pair in itertools.pairwise(ends) for _ in range(*pair)] + [(0, 0)] * padding
    assert list(zip(start[0].tolist(), end[0].tolist(), strict=True)) == want


def call(length: int, memory_len: int) -> dict[str, Any]:
    q, k, v = torch.randn(3, 3, 2, length, 8)
    r, (u, w) = torch.randn(2, memory_len + length, 8), torch.randn(2, 2, 8)
    memory = tuple(torch.randn(2, 3, 2, memory_len, 8))
    return {"q": q, "k": k, "v": v, "r": r, "content_bias": u, "position_bias": w, "memory": memory}


def test_lengths_equal_shorter_calls() -> None:
    whole = call(5, 6)
    of_memory, of_segment = torch.tensor([6, 2, 0]), torch.tensor([5, 3, 1], dtype=torch.int32)
    padded = rel_attention(**whole, start=start_from_lengths(of_memory, 6), end=end_from_lengths(of_segment, 6))
    for b, (m, n) in enumerate(zip(of_memory.tolist(), of_segment.tolist(), strict=True)):
        row = {name: x[b : b + 1, :, :n] for name, x in whole.items() if name in "qkv"}
        memory = tuple(x[b : b + 1, :, 6 - m :] for x in whole["memory"])
        torch.testing.assert_close(padded[b : b + 1, :, :n], rel_attention(**whole | row | {"memory": memory}))


FLAGS = torch.zeros(2, 3, dtype=torch.bool)
BAD = [
    (lambda: start_from_done(FLAGS.int(), 3), TypeError, r"done must be a bool tensor \[B, L\], got torch.int32"),
    (lambda: start_from_done(FLAGS.float(), 3), TypeError, r"got torch.float32; pass done\.bool\(\)$"),
    (lambda: start_from_done([True], 3), TypeError, "got list$"),
    (lambda: start_from_done(FLAGS[0], 3), ValueError, r"done must be \[B, L\], got shape \[3\]"),
    (lambda: start_from_done(FLAGS, -1), ValueError, r"memory_len must be an integer >= 0, got -1"),
    (lambda: start_from_done(FLAGS, 4, FLAGS), ValueError, r"memory_done must be \[B, M\] = \[2, 4\] .*got shape \[2, 3\]"),
    (lambda: start_from_lengths([1], 3), TypeError, r"lengths must be an int32 or int64 tensor \[B\], got list"),
    (lambda: start_from_lengths(torch.tensor([4]), 3), ValueError, r"lengths must be from 0 to total=3, .* 4 to 4"),
    (lambda: end_from_lengths(torch.tensor([-1])), ValueError, r"lengths must be >= 0, got values from -1 to -1"),
    (lambda: end_from_lengths(torch.tensor([[1]])), ValueError, r"lengths must be \[B\], got shape \[1, 1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "message"), BAD)
def test_errors_name_the_argument(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()


def test_bounds_on_meta() -> None:
    """There are shapes, and no values to check."""
    q, r, lengths = torch.empty(3, 2, 6, 8, device="meta"), torch.empty(2, 12, 8, device="meta"), torch.ones(3).long()
    start, end = intervals(torch.ones(3, 6, device="meta").bool(), visible=True)
    options: list[dict[str, Any]] = [
        {"start": start, "end": end},
        {"end": end_from_lengths(lengths.to("meta"))},
        {"prefix": 3},
    ]
    for option in options:
        out = rel_attention(q, q, q, r, **option)
        assert (out.shape, out.is_meta) == (q.shape, True)
    assert rel_attention(q, q, q, r, zero_row=5, causal=False, chunk=(2, 1)).shape == q.shape


@pytest.mark.parametrize("length", [2**32 + 3, 2**40])
def test_lengths_beyond_32_bits_are_out_of_range(length: int) -> None:
    with pytest.raises(ValueError, match="end must hold key indices"):
        rel_attention(**call(5, 6), end=end_from_lengths(torch.tensor([length, 1, 1]), 6))


def test_compiled_bounds() -> None:
    def bounds(done: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return start_from_done(done, 3), end_from_lengths(lengths, 3)

    done, lengths = torch.rand(2, 4) < 0.5, torch.tensor([1, 4])
    got = torch.compile(bounds, fullgraph=True, backend="eager")(done, lengths)
    assert all(torch.equal(a, b) for a, b in zip(got, bounds(done, lengths), strict=True))


def interval_of(row: list[bool]) -> tuple[int, int, bool]:
    """First visible key, one past the last, whether one between is hidden."""
    seen = [j for j, x in enumerate(row) if x]
    return (seen[0], seen[-1] + 1, len(seen) < seen[-1] + 1 - seen[0]) if seen else (0, 0, False)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_intervals_by_definition(data: st.DataObject) -> None:
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


def test_bytes_other_than_0_and_1_are_true() -> None:
    mask = torch.tensor([[0, 2, 2, 0]], dtype=torch.uint8).view(torch.bool)
    assert [x.tolist() for x in intervals(mask, visible=True)] == [[[1]], [[3]]]


def test_shapes_of_masks() -> None:
    padding = torch.tensor([[True, True, False], [False, True, True]])
    want = (torch.tensor([[0], [1]]), torch.tensor([[2], [3]]))
    rows = padding[:, None]
    for mask in (padding, rows, rows.expand(2, 7, 3), rows[:, None].expand(2, 1, 7, 3)):
        assert all(torch.equal(a, b) for a, b in zip(intervals(mask, visible=True), want, strict=True))
    assert intervals(rows.repeat(1, 7, 1), visible=True)[0].shape == (2, 7)
    assert [x.tolist() for x in intervals(~padding, visible=False)] == [x.tolist() for x in want]


def test_mask_with_a_hole_is_refused() -> None:
    mask = torch.ones(3, 2, 5, dtype=torch.bool)
    mask[1, 1, 2] = False
    with pytest.raises(ValueError, match=r"mask must hide no key between visible ones .*for batch row 1, query 1"):
        intervals(mask, visible=True)
    assert intervals(mask, visible=True, check=False)[1].tolist() == [[5, 5]] * 3
    compiled = torch.compile(functools.partial(intervals, visible=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(mask[:1])[1], torch.full((1, 2), 5))
    with pytest.raises(RuntimeError, match="mask has a hidden key between visible ones"):
        compiled(mask)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(2, 3), TypeError, "mask must be a bool tensor, got torch.float32; .* mask == 0 for an additive mask"),
        (torch.ones(2, 3).long(), TypeError, r"got torch.int64; pass mask.bool\(\) for a mask of 0 and 1 .*1 where"),
        (None, TypeError, "mask must be a bool tensor, got NoneType"),
        (torch.ones(3).bool(), ValueError, r"mask must be \[B, S\], .* got shape \[3\]"),
        (torch.ones(2, 2, 3, 3).bool(), ValueError, r"got shape \[2, 2, 3, 3\]"),
    ],
    ids=["floats", "integers", "none", "one axis", "per head"],
)  # fmt: skip
def test_bad_masks(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        intervals(mask, visible=True)


def test_visible_is_required() -> None:
    """torch's own modules hide True, `scaled_dot_product_attention` shows it."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'visible'"):
        intervals(mask)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="visible must be True or False, got Tensor"):
        intervals(mask, visible=mask)  # type: ignore[arg-type]


@torch.no_grad()
def test_key_padding_mask_of_torch() -> None:
    """Without positions the scores are those of torch's module, mask included."""
    theirs = torch.nn.MultiheadAttention(16, 2, bias=False, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    key_padding_mask = torch.tensor([[False] * 5, [False, False, False, True, True]])
    want, _ = theirs(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)
    q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (x @ theirs.in_proj_weight.T).chunk(3, -1))
    start, end = intervals(key_padding_mask, visible=False)
    out = rel_attention(q, k, v, torch.zeros(2, 9, 8), causal=False, zero_row=4, start=start, end=end)
    torch.testing.assert_close(theirs.out_proj(out.transpose(1, 2).flatten(2)), want)


def test_operator_of_masks() -> None:
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    torch.library.opcheck(torch.ops.txl_kernels.intervals.default, (mask, True))
