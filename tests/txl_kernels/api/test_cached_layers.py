"""Key/value caches: streams in segments equal one call, beside layers and beside rel_attention;
ownership, failed calls, chunks, resets and errors."""

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import COPIES, OPTIONS, WIDTH, definition, hidden, layer, run

from txl_kernels import KeyValueCache, rel_attention
from txl_kernels.cache import unchanged_on_error

STATIC = pytest.mark.parametrize("static", [False, True], ids=["growing cache", "static cache"])
BOTH = pytest.mark.parametrize("name", ["plain", "learned, every option"])


def new_cache(it: Any, mem_len: int, max_segment: int, static: bool) -> KeyValueCache:
    start = torch.full((2, 1), mem_len, dtype=torch.int32) if static else None
    made: KeyValueCache = it.new_cache(2, mem_len, max_segment, start=start)
    return made


@pytest.mark.parametrize("cuts", [[15], [1] * 15, [5, 1, 7, 2], [3] * 5], ids=["one call", "steps", "uneven", "chunks"])
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_cache_equals_hidden_state_memory(name: str, cuts: list[int]) -> None:
    it, x = layer(name), hidden(15)
    if it.chunk is None and not it.causal:
        with pytest.raises(ValueError, match="a key/value cache needs causal=True"):
            it.new_cache(2, 15, 15)
        return
    if it.chunk is not None and max(cuts) != it.chunk[0]:
        with pytest.raises(ValueError, match=f"max_segment must be the size of a chunk, 3, got {max(cuts)}"):
            it.new_cache(2, 6, max(cuts))
        return
    for mem_len in (0, 1, 7, 15) if it.chunk is None else (6,):
        cache, first, parts = it.new_cache(2, mem_len, max(cuts)), 0, []
        for length in cuts:
            part, memory = x[:, first : first + length], x[:, max(first - mem_len, 0) : first]
            parts.append(run(it, part, cache=cache))
            if it.chunk is None:
                torch.testing.assert_close(parts[-1], run(it, part, memory), rtol=0, atol=1e-12)
            first += length
            assert len(cache) == min(first, mem_len)
        if it.chunk is not None or mem_len == 15:
            torch.testing.assert_close(torch.cat(parts, 1), definition(it, x)[0])
        assert [y.shape for y in cache.memory] == [(2, it.n_kv_head, min(15, mem_len), it.d_head)] * 2
        filled = it.new_cache(2, mem_len, max(cuts))
        it.fill_cache(filled, x if it.batch_first else x.transpose(0, 1))
        torch.testing.assert_close(filled.memory, cache.memory)


@pytest.mark.parametrize(("options", "mem_len", "max_segment"), [
    ({"window": 4}, 3, 1), ({"window": (7, None)}, 7, 1), ({"causal": False, "chunk": (3, 2)}, 6, 3),
    ({"causal": False, "chunk": (3, 4), "window": (5, 2)}, 5, 3),
])  # fmt: skip
@torch.no_grad()
def test_default_sizes_are_those_of_the_window_or_chunks(options: Any, mem_len: int, max_segment: int) -> None:
    it, x = layer(**options), hidden(18)
    cache = it.new_cache(2)
    assert (cache.mem_len, cache.max_segment) == (mem_len, max_segment)
    found = torch.cat([it(part, cache=cache) for part in x.split(max_segment, 1)], 1)
    torch.testing.assert_close(found, it(x))


def test_length_of_a_memory_without_a_window_must_be_given() -> None:
    for it in (layer(), layer(window=(None, 0)), layer(causal=False, chunk=(3, None))):
        with pytest.raises(ValueError, match="mem_len must be given for a layer without a window"):
            it.new_cache(2)
    assert layer().new_cache(2, window=9).mem_len == 8


@pytest.mark.parametrize("name", ["grouped", "chunks"])
@torch.no_grad()
def test_cache_without_a_table(name: str) -> None:
    """The layer computes the table for each call."""
    it, x = layer(name), hidden(15)
    cache = KeyValueCache(None, 2, 6 if it.chunk else 14, 3, n_kv_head=it.n_kv_head, d_key=3, dtype=torch.float64)
    parts = [it(part, cache=cache) for part in x.split(3, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), definition(it, x)[0])


B, H, L, D, DV, DP = 2, 4, 17, 8, 5, 3
TABLES: dict[str, dict[str, Any]] = {
    "a row for every distance": {"r": torch.randn(H, L + 4, D, dtype=torch.float64)},
    "a shared table of another width": {"r": torch.randn(1, L + 4, DP, dtype=torch.float64)},
    "no table": {"r": None, "dtype": torch.float64},
}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_cache_beside_rel_attention(table: dict[str, Any], n_kv_head: int, window: int | None) -> None:
    q = torch.randn(B, H, L, D, dtype=torch.float64)
    k = torch.randn(B, n_kv_head, L, D, dtype=torch.float64)
    v = torch.randn(B, n_kv_head, L, DV, dtype=torch.float64)
    sizes = {"n_kv_head": n_kv_head, "d_key": D, "d_value": DV}
    cache = KeyValueCache(batch=B, mem_len=L, max_segment=4, window=window, **sizes, **table)
    assert {name: getattr(cache, name) for name in sizes} == sizes
    assert (cache.dtype, cache.batch) == (q.dtype, B)
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


def test_oldest_positions_are_dropped_and_rows_reordered() -> None:
    """Keys and values stay together when they move to the buffers' front."""
    cache = KeyValueCache(None, 3, 5, 2, n_kv_head=2, d_key=4, d_value=3)
    k, v = torch.randn(3, 2, 40, 4), torch.randn(3, 2, 40, 3)
    rows, storage = torch.tensor([2, 0, 0]), cache.memory[0].untyped_storage().data_ptr()
    for first in range(0, 40, 2):
        cache.append(k[:, :, first : first + 2], v[:, :, first : first + 2])
        for found, x in zip(cache.memory, (k, v), strict=True):
            assert torch.equal(found, x[:, :, max(first - 3, 0) : first + 2])
    assert cache.memory[0].untyped_storage().data_ptr() == storage
    cache.reorder(rows)
    for found, x in zip(cache.memory, (k, v), strict=True):
        assert torch.equal(found, x[rows, :, 35:])


@torch.no_grad()
def test_reordered_rows_of_a_layers_cache() -> None:
    """Rows that were reset keep where they began."""
    it, text, more = layer(), hidden(6, 3), hidden(3, 3)
    rows = torch.tensor([2, 0, 0])
    caches = [it.new_cache(3, 4, 3) for _ in range(2)]
    for cache, order in zip(caches, (torch.arange(3), rows), strict=True):
        it(text[order, :3], cache=cache)
        cache.reset(torch.tensor([False, False, True])[order])
        it(text[order, 3:], cache=cache)
    caches[0].reorder(rows)
    torch.testing.assert_close(it(more, cache=caches[0]), it(more, cache=caches[1]))


def test_repr_and_bytes() -> None:
    table = torch.zeros(1, 128, 3)
    cache = KeyValueCache(table, 3, 100, 28, n_kv_head=2, d_key=8, d_value=16)
    assert cache.nbytes == 4 * (3 * 2 * 228 * (8 + 16) + 384)
    assert repr(cache).startswith(
        "KeyValueCache(0 of 100 positions held, batch=3, heads=2, width=8 and 16, max_segment=28"
    )
    cache = KeyValueCache(torch.zeros(3, 9, 4, dtype=torch.float64), 2, 5, 4)  # sizes and dtype of the table
    assert [x.shape for x in cache.memory] == [(2, 3, 0, 4)] * 2
    assert cache.dtype == torch.float64
    assert repr(new_cache(layer(), 4, 3, static=True)).startswith("StaticCache(4 of 4 positions")


@STATIC
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@BOTH
@torch.no_grad()
def test_copied_cache_belongs_to_equal_parameters(name: str, copied: Callable[[Any], Any], static: bool) -> None:
    own, other, x = (*(layer(name, window=6, batch_first=True) for _ in range(2)), hidden(8))
    cache = new_cache(own, 5, 4, static)
    own(x[:, :4], cache=cache)
    if static:
        cache.start.sub_(4)  # type: ignore[union-attr]
    want = own(x)[:, 4:]
    with pytest.raises(ValueError, match="cache must be this layer's own, got a copy of the cache of a layer with oth"):
        other(x[:, 4:], cache=copied(cache))
    loaded = layer(name, window=6, batch_first=True)
    loaded.load_state_dict(own.state_dict())
    for it in (own, loaded):
        torch.testing.assert_close(it(x[:, 4:], cache=copied(copied(cache))), want)
    if copied is not copy.copy:
        with_its_layer, its_cache = copied((own, cache))
        torch.testing.assert_close(with_its_layer(x[:, 4:], cache=its_cache), want)
        with pytest.raises(ValueError, match="got another layer's"):
            own(x[:, 4:], cache=its_cache)


@torch.no_grad()
def test_copied_cache_of_a_missing_or_changed_layer_is_refused() -> None:
    it, x = layer(), hidden(4)
    cache = it.new_cache(2, 5, 4)
    twin, before = copy.deepcopy((it, cache))[0], copy.deepcopy(cache)

    def refused(user: Any, copied: KeyValueCache) -> None:
        with pytest.raises(ValueError, match="a copy of the cache of a layer with other parameters"):
            user(x, cache=copied)

    it.qkv.weight[0, 0] += 1e-9
    refused(it, before)
    twin.clamp_len = 3  # W_kR R in the cache is of other distances
    refused(twin, copy.deepcopy(before))
    it.to("meta")  # offloaded: its parameters cannot be read
    refused(twin, copy.deepcopy(cache))
    del it
    refused(twin, copy.deepcopy(cache))


@torch.no_grad()
def test_cache_belongs_to_one_layer() -> None:
    """A stack that hands its cache on would mix the keys of its layers."""
    first, second, x = layer(), layer(), hidden(3)
    for cache in (first.new_cache(2, 4, 3), KeyValueCache(first.new_cache(2, 4, 3).r, 2, 4, 3)):
        first(x, cache=cache)
        with pytest.raises(ValueError, match="cache must be this layer's own, got another layer's"):
            second(x, cache=cache)
        assert len(cache) == 3
    for _ in range(20):  # a new layer often has the memory address of the deleted one
        deleted = layer()
        gone, cache = weakref.ref(deleted), deleted.new_cache(2, 8, 4)
        deleted(x, cache=cache)
        del deleted
        assert gone() is None
        with pytest.raises(ValueError, match="another layer's"):
            layer()(x, cache=cache)


def fails(*_: Any) -> None:
    raise MemoryError


@STATIC
@BOTH
@torch.no_grad()
def test_failed_call_leaves_the_cache_unchanged(name: str, static: bool) -> None:
    it, x = layer(name, window=6, batch_first=True), hidden(12)
    cache = new_cache(it, 5, 4, static)
    parts = []
    for part in x.split(4, 1):
        hook = it.out.register_forward_pre_hook(fails)
        with pytest.raises(MemoryError):
            it(part, cache=cache)
        hook.remove()
        parts.append(it(part, cache=cache))
        if static:
            cache.start.sub_(4).clamp_(min=0)  # type: ignore[union-attr]
    torch.testing.assert_close(torch.cat(parts, 1), it(x))


def interrupted(cache: KeyValueCache, *calls: Callable[[], Any]) -> None:
    with contextlib.suppress(KeyboardInterrupt), unchanged_on_error([cache]):
        for call in calls:
            call()
        raise KeyboardInterrupt


@torch.no_grad()
def test_interrupted_appends_are_undone() -> None:
    """At any fill level, over moves to the buffers' front and resets of rows."""
    cache, twin = (KeyValueCache(None, 2, 5, 4, n_kv_head=1, d_key=3, dtype=torch.float64) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for n in range(60):
        k = torch.randn(2, 1, 1 + n % 4, 3, dtype=torch.float64, generator=generator)
        interrupted(cache, lambda k=k: cache.append(-k, k))
        if n % 13 == 5:
            for it in (cache, twin):
                it.reset(torch.tensor([n % 2 == 0, True]))
        for it in (cache, twin):
            it.append(k, -k)
        assert all(torch.equal(a, b) for a, b in zip(cache.memory, twin.memory, strict=True))
        starts = cache.start, twin.start
        assert starts == (None, None) or torch.equal(*starts)  # type: ignore[arg-type]


@torch.no_grad()
def test_cache_that_cannot_be_restored_is_refused_until_cleared() -> None:
    it, x = layer(), hidden(4)
    cache = it.new_cache(2, 5, 4)
    interrupted(cache, lambda: it(x, cache=cache), lambda: it(x, cache=cache))
    for use in (lambda: it(x, cache=cache), lambda: cache.append(x, x), lambda: cache.memory):
        with pytest.raises(RuntimeError, match=r"cache is not whole, because an error interrupted .*: clear\(\) it"):
            use()
    cache.clear()
    torch.testing.assert_close(it(x, cache=cache), it(x))


@STATIC
@torch.no_grad()
def test_segment_inside_a_chunk_is_refused(static: bool) -> None:
    it, x = layer("chunks", chunk=(4, 2)), hidden(15)
    cache, whole = new_cache(it, 8, 4, static), it(x)

    def read(first: int, last: int) -> None:
        torch.testing.assert_close(it(x[:, first:last], cache=cache), whole[:, first:last])
        if static:
            cache.start.sub_(last - first).clamp_(min=0)  # type: ignore[union-attr]

    for _ in range(2):
        for first in range(0, 15, 4):
            read(first, min(first + 4, 15))
        message = "cache must hold whole chunks of 4 positions before the next segment, got 15 appended positions"
        with pytest.raises(ValueError, match=message):
            it(x[:, :1], cache=cache)
        with pytest.raises(ValueError, match=message):
            it.fill_cache(cache, x[:, :4])
        cache.clear()
    with pytest.raises(ValueError, match=r"memory must be whole chunks of 4 positions, got shape \[2, 6, 12\]"):
        it.fill_cache(cache, x[:, :6])
    read(0, 4)


@torch.no_grad()
def test_cached_call_does_not_drop() -> None:
    it, x = layer(attn_dropout=0.1).train(), hidden(3)
    with pytest.raises(RuntimeError, match=r"attn_dropout=0.1; call eval\(\) on it first"):
        it(x, cache=it.new_cache(2, 4, 3))
    it.eval()(x, cache=it.new_cache(2, 4, 3))
    plain = layer().train()  # without dropout
    plain(x, cache=plain.new_cache(2, 4, 3))


@torch.no_grad()
def test_unfitting_caches_are_refused_before_any_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the layer's arguments, not k, v and r. A call that was right is remembered."""
    it = layer()
    cache = it.new_cache(2, 4, 3)
    it(hidden(3), cache=cache)
    monkeypatch.setattr("txl_kernels.attention_layer.rel_attention", None)
    with pytest.raises(ValueError, match=r"x must be a segment of at most max_segment=3 .*got shape \[2, 4, 12\]"):
        it(hidden(4), cache=cache)
    with pytest.raises(ValueError, match=r"x must have the cache's batch 2, got shape \[3, 2, 12\]"):
        it(hidden(2, 3), cache=cache)
    with pytest.raises(ValueError, match=r"memory must have the cache's batch 2, got shape \[1, 2, 12\]"):
        it.fill_cache(cache, hidden(2, 1))
    with pytest.raises(ValueError, match=r"cache must be this layer's, with .* \(2, 3, 3\), got one with \(4, 3, 3\)"):
        layer("grouped")(hidden(2), cache=cache)
    with pytest.raises(TypeError, match=r"cache must have x's dtype torch\.float32, got torch\.float64"):
        it(hidden(2).float(), cache=cache)
    with pytest.raises(ValueError, match="cache must be given alone"):
        it(hidden(3), hidden(3), cache=cache)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="cache is for evaluation"):
        it(hidden(3), cache=cache)
    with_table = KeyValueCache(torch.zeros(4, 9, WIDTH, dtype=torch.float64), 2, 5, 4, n_kv_head=4, d_key=3)
    with pytest.raises(ValueError, match=r"cache must hold no table r, .* got r of shape \[4, 9, 12\]"):
        layer("learned")(hidden(3), cache=with_table)
    with pytest.raises(ValueError, match="max_segment must be an integer >= 1, got 0"):
        it.new_cache(1, 4, 0)
    with pytest.raises(ValueError, match="window must be None or"):
        it.new_cache(1, 4, 4, window=0)
    with pytest.raises(TypeError, match="like must be None or hidden states, got int"):
        it.new_cache(1, 4, 4, like=3)
    with pytest.raises(TypeError, match=r"like must have the layer's dtype torch\.float64, got torch\.float32"):
        it.new_cache(1, 4, 4, like=hidden(3).float())
    with pytest.raises(TypeError, match="cache must be a KeyValueCache of new_cache, got NoneType"):
        it.fill_cache(None, hidden(3))
    with pytest.raises(TypeError, match=r"memory must be a torch\.Tensor, got NoneType"):
        it.fill_cache(cache, None)
    assert len(cache) == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_kv_head": None}, "n_kv_head must be an integer >= 1 where r is None, got NoneType"),
        ({"d_value": 0}, "d_value must be an integer >= 1 where r is None, got 0"),
        ({"r": torch.zeros(1, 8, 3)}, r"r must be \[H or 1, T >= zero_row \+ mem_len \+ max_segment = 9, Dp\], got \[1, 8"),
        ({"r": torch.zeros(9, 3)}, r"r must be \[H or 1, T >= .* = 9, Dp\], got \[9, 3\]"),
        ({"r": [1]}, "r must be None or a torch.Tensor, got list"),
        ({"dtype": torch.int32}, "dtype must be a floating-point dtype, got torch.int32"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)  # fmt: skip
def test_bad_arguments(changed: dict[str, Any], message: str) -> None:
    given = {"r": None, "batch": 1, "mem_len": 5, "max_segment": 4, "n_kv_head": 2, "d_key": 8, "d_value": 8} | changed
    with pytest.raises((TypeError, ValueError), match=message):
        KeyValueCache(**given)


@pytest.mark.parametrize("given", [False, True])
@torch.no_grad()
def test_reset_rows(given: bool) -> None:
    """Each row equals a cache of its own that is cleared instead. Some rows are reset while older
    resets are still held, some long after."""
    it = layer(window=7)
    together, alone = it.new_cache(3, 6, 4), [it.new_cache(1, 6, 4) for _ in range(3)]
    resets = {2: [True, False, False], 3: [False, True, True], 4: [False, False, True], 9: [True, False, True]}
    has_start = False
    for n in range(16):
        if n in resets:
            together.reset(torch.tensor(resets[n]))
            for row, reset in zip(alone, resets[n], strict=True):
                if reset:
                    row.clear()
        x, held = hidden(1 + n % 4, 3), len(together)
        start = torch.full((3, 1), max(held - 2, 0)) if given else None
        got = it(x, cache=together, start=start)
        has_start |= together.start is not None
        for b, row in enumerate(alone):
            own = torch.full((1, 1), max(len(row) - 2, 0)) if given else None
            torch.testing.assert_close(got[b : b + 1], it(x[b : b + 1], cache=row, start=own))
    assert has_start
    assert together.start is None, "bounds cost nothing when no held position is older than a reset"
    together.reset()
    assert len(together) == 0


@pytest.mark.parametrize("held", [0, 3])
@torch.no_grad()
def test_hidden_padding(held: int) -> None:
    """Each row equals a cache of its own without the padding, part of which is held already."""
    it, counts = layer(window=7), [4, 0, 2]
    together, alone = it.new_cache(3, 6, 4), [it.new_cache(1, 6, 4) for _ in range(3)]
    before = hidden(held, 3)
    if held:
        it.fill_cache(together, before)
    together.hide(torch.tensor(counts))
    x = hidden(4, 3)
    got = it(x, cache=together)
    for b, row in enumerate(alone):
        if counts[b] < held:
            it.fill_cache(row, before[b : b + 1, counts[b] :])
        own = max(counts[b] - held, 0)
        if own < 4:
            torch.testing.assert_close(got[b : b + 1, own:], it(x[b : b + 1, own:], cache=row))
    for _ in range(8):
        x = hidden(2, 3)
        got = it(x, cache=together)
        for b, row in enumerate(alone):
            torch.testing.assert_close(got[b : b + 1], it(x[b : b + 1], cache=row))
    assert together.start is None, "bounds cost nothing when no padding is held"


@torch.no_grad()
def test_start_out_of_range_beside_a_reset() -> None:
    it = layer()
    cache = it.new_cache(2, 6, 4)
    it(hidden(4), cache=cache)
    cache.reset(torch.tensor([True, False]))
    with pytest.raises(
        ValueError, match=r"start must hold key indices in \[0, M \+ L\] = \[0, 6\], got values from -1"
    ):
        it(hidden(2), cache=cache, start=torch.tensor([[-1], [0]]))


def test_cache_of_inference_mode_works_without() -> None:
    it, x = layer(), hidden(3)
    with torch.inference_mode():
        cache = it.new_cache(2, 6, 4)
        copies = [copied(cache) for copied in COPIES.values()]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for one in (cache, *copies):
                it(x, cache=one)
    assert [len(one) for one in (cache, *copies)] == [6] * (1 + len(COPIES))


WRONG_SHAPES = r"k and v must be \[2, 4, L <= 4, 3\] and \[2, 4, L <= 4, 3\], got"
BAD_CALLS: list[tuple[Callable[[KeyValueCache], Any], type[Exception], str]] = [
    (lambda cache: cache.reset([0]), TypeError, r"rows must be None or a bool tensor \[B\], got list"),
    (lambda cache: cache.reset(torch.zeros(3).bool()), ValueError, r"rows must be \[B\] = \[2\] on cpu, got shape \[3\]"),
    (lambda cache: cache.hide(torch.tensor([1, -1])), ValueError, "counts must be >= 0, got -1"),
    (lambda cache: cache.hide(torch.ones(2)), TypeError, r"counts must be an int64 tensor \[B\], got torch.float32"),
    (lambda cache: cache.reorder([0, 1]), TypeError, "rows must be an int64 tensor"),
    (lambda cache: cache.reorder(torch.zeros(2).int()), TypeError, r"rows must be .*got torch\.int32"),
    (lambda cache: cache.reorder(torch.zeros(3).long()), ValueError, r"rows must be \[B\] = \[2\]"),
    (lambda cache: cache.reorder(torch.tensor([0, 2])), ValueError, "rows must be from 0 to 1, got 0 to 2"),
    (lambda cache: cache.append(torch.zeros(2, 4, 3, 3).int(), torch.zeros(2, 4, 3, 3)), TypeError,
     "k must be a tensor of a floating-point dtype, got torch.int32"),
    (lambda cache: cache.append(torch.zeros(2, 4, 3, 3), None), TypeError, "v must be .*, got NoneType"),
    (lambda cache: cache.append(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 3)), ValueError, WRONG_SHAPES),
    (lambda cache: cache.append(torch.zeros(2, 4, 3, 3), torch.zeros(2, 4, 2, 3)), ValueError, WRONG_SHAPES),
    (lambda cache: cache.append(torch.zeros(2, 4, 5, 3), torch.zeros(2, 4, 5, 3)), ValueError, WRONG_SHAPES),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_bad_calls(call: Callable[[KeyValueCache], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(layer().new_cache(2, 6, 4))
