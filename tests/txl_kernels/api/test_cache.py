"""KeyValueCache without a layer: any heads, widths and table, beside calls of rel_attention."""

from typing import Any

import pytest
import torch

from txl_kernels import KeyValueCache, rel_attention

B, H, L, D, DV, DP = 2, 4, 17, 8, 5, 3
TABLES: dict[str, dict[str, Any]] = {
    "a row for every distance": {"r": torch.randn(H, L + 4, D, dtype=torch.float64)},
    "a shared table of another width": {"r": torch.randn(1, L + 4, DP, dtype=torch.float64)},
    "no table": {"r": None, "dtype": torch.float64},
}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_segments_equal_one_call(table: dict[str, Any], n_kv_head: int, window: int | None) -> None:
    q = torch.randn(B, H, L, D, dtype=torch.float64)
    k = torch.randn(B, n_kv_head, L, D, dtype=torch.float64)
    v = torch.randn(B, n_kv_head, L, DV, dtype=torch.float64)
    cache = KeyValueCache(
        batch=B, mem_len=L, max_segment=4, window=window, n_kv_head=n_kv_head, d_key=D, d_value=DV, **table
    )
    assert (cache.n_kv_head, cache.d_key, cache.d_value, cache.dtype, cache.batch) == (n_kv_head, D, DV, q.dtype, B)
    q_pos = torch.randn(B, H, L, DP, dtype=torch.float64) if cache.r is not None and cache.r.size(2) == DP else None
    r_bias = torch.randn(H, L, dtype=torch.float64) if cache.r is None else None
    options = {"r_bias": r_bias, "window": cache.window}
    parts = []
    for rows in torch.arange(L).split(4):
        part = [x[:, :, rows] for x in (q, k, v)]
        positions = None if q_pos is None else q_pos[:, :, rows]
        parts.append(rel_attention(*part, cache.r, memory=cache.memory, q_pos=positions, **options))
        cache.append(*part[1:])
    torch.testing.assert_close(torch.cat(parts, 2), rel_attention(q, k, v, cache.r, q_pos=q_pos, **options))
    assert [x.shape for x in cache.memory] == [(B, n_kv_head, L, D), (B, n_kv_head, L, DV)]


def test_without_sizes_they_are_the_tables() -> None:
    cache = KeyValueCache(torch.zeros(3, 9, 4, dtype=torch.float64), 2, 5, 4)
    assert [x.shape for x in cache.memory] == [(2, 3, 0, 4)] * 2
    assert cache.dtype == torch.float64


def test_the_oldest_are_dropped_and_rows_reordered() -> None:
    """Keys and values stay together over the moves to the buffers' front."""
    cache = KeyValueCache(None, 3, 5, 2, n_kv_head=2, d_key=4, d_value=3)
    k, v = torch.randn(3, 2, 40, 4), torch.randn(3, 2, 40, 3)
    rows, storage = torch.tensor([2, 0, 0]), cache.memory[0].untyped_storage().data_ptr()
    for first in range(0, 40, 2):
        cache.append(k[:, :, first : first + 2], v[:, :, first : first + 2])
        held = slice(max(first - 3, 0), first + 2)
        assert torch.equal(cache.memory[0], k[:, :, held])
        assert torch.equal(cache.memory[1], v[:, :, held])
    assert cache.memory[0].untyped_storage().data_ptr() == storage
    cache.reorder(rows)
    assert torch.equal(cache.memory[0], k[rows, :, 35:])
    assert torch.equal(cache.memory[1], v[rows, :, 35:])


def test_repr_and_bytes() -> None:
    table = torch.zeros(1, 128, 3)
    cache = KeyValueCache(table, 3, 100, 28, n_kv_head=2, d_key=8, d_value=16)
    assert cache.nbytes == 4 * (3 * 2 * 228 * (8 + 16) + 384)
    assert repr(cache) == (
        "KeyValueCache(0 of 100 positions held, batch=3, heads=2, width=8 and 16, max_segment=28, window=None, "
        "float32 on cpu, 0.1 MiB)"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_kv_head": None}, "n_kv_head must be an integer >= 1 where r is None, got NoneType"),
        ({"d_value": 0}, "d_value must be an integer >= 1 where r is None, got 0"),
        (
            {"r": torch.zeros(1, 8, 3)},
            r"r must be \[H or 1, T >= zero_row \+ mem_len \+ max_segment = 9, Dp\], got \[1, 8, 3\]",
        ),
        ({"r": torch.zeros(9, 3)}, r"r must be \[H or 1, T >= .* = 9, Dp\], got \[9, 3\]"),
        ({"r": [1]}, "r must be None or a torch.Tensor, got list"),
        ({"dtype": torch.int32}, "dtype must be a floating-point dtype, got torch.int32"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_bad_arguments(changed: dict[str, Any], message: str) -> None:
    given = {"r": None, "batch": 1, "mem_len": 5, "max_segment": 4, "n_kv_head": 2, "d_key": 8, "d_value": 8} | changed
    with pytest.raises((TypeError, ValueError), match=message):
        KeyValueCache(**given)


def test_segments_of_another_shape_are_refused() -> None:
    cache = KeyValueCache(None, 1, 5, 4, n_kv_head=2, d_key=4, d_value=3)
    for k, v in (((1, 2, 3, 8), (1, 2, 3, 3)), ((1, 2, 3, 4), (1, 2, 2, 3)), ((1, 2, 5, 4), (1, 2, 5, 3))):
        with pytest.raises(ValueError, match=r"k and v must be \[1, 2, L <= 4, 4\] and \[1, 2, L <= 4, 3\], got"):
            cache.append(torch.zeros(k), torch.zeros(v))
