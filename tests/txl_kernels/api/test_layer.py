"""RelAttention: layouts, memory, cache, biases, and what it refuses."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from txl_kernels import KeyValueCache, RelAttention, rel_attention, sinusoid
from txl_kernels import attention_layer as layers

B, L, M, WIDTH, HEADS = 2, 6, 5, 12, 3


def layer(**options: object) -> RelAttention:
    made = RelAttention(WIDTH, HEADS, 4, dtype=torch.float64, **options).eval()
    nn.init.normal_(made.content_bias)
    nn.init.normal_(made.position_bias)
    return made


def hidden(length: int, batch: int = B) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


@torch.no_grad()
def test_a_cache_is_one_layers() -> None:
    """A stack that hands its cache on would mix the keys of its layers."""
    first, second = RelAttention(16, 2).eval(), RelAttention(16, 2).eval()
    x = torch.randn(1, 3, 16)
    cache = first.new_cache(1, 4, 3)
    with pytest.raises(ValueError, match="cache must be this layer's own, got another layer's"):
        second(x, cache=cache)
    assert len(cache) == 0
    by_hand = KeyValueCache(cache.r, 1, 4, 3)
    first(x, cache=by_hand)
    with pytest.raises(ValueError, match="cache must be this layer's own"):
        second(x, cache=by_hand)
    elsewhere = pickle.loads(pickle.dumps(by_hand))  # another process, where ids are others
    assert torch.equal(first(x, cache=elsewhere), first(x, cache=by_hand))


@torch.no_grad()
def test_a_cached_call_does_not_drop() -> None:
    dropping = RelAttention(16, 2, attn_dropout=0.1)
    x = torch.randn(1, 3, 16)
    with pytest.raises(RuntimeError, match=r"attn_dropout=0.1; call eval\(\) on it first"):
        dropping(x, cache=dropping.new_cache(1, 4, 3))
    dropping.eval()(x, cache=dropping.new_cache(1, 4, 3))
    plain = RelAttention(16, 2)  # in training mode, where nothing is dropped
    plain(x, cache=plain.new_cache(1, 4, 3))


def test_a_mask_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(
        TypeError, match=r"^RelAttention takes no attn_mask: .* start and end, and txl_kernels.intervals"
    ):
        RelAttention(16, 2)(torch.randn(1, 3, 16), attn_mask=torch.ones(3, 3).bool())


def test_equals_the_projections_written_out() -> None:
    it, x, memory = layer(), hidden(L), hidden(M)
    w_q, w_k, w_v = it.qkv.weight.split(12)

    def heads(y: torch.Tensor) -> torch.Tensor:
        return y.view(B, -1, HEADS, 4).transpose(1, 2)

    both = torch.cat([memory, x], 1)
    k, v = heads(both @ w_k.T), heads(both @ w_v.T)
    r = (sinusoid(torch.arange(M + L), WIDTH, torch.float64) @ it.r.weight.T).view(-1, HEADS, 4).transpose(0, 1)
    out = rel_attention(
        heads(x @ w_q.T), k[:, :, M:], v[:, :, M:], r, it.content_bias, it.position_bias, (k[:, :, :M], v[:, :, :M])
    )
    want = out.transpose(1, 2).reshape(B, L, 12) @ it.out.weight.T
    torch.testing.assert_close(it(x, memory), want)


def test_length_first_layout() -> None:
    it, x, memory = layer(), hidden(L), hidden(M)
    other = layer(batch_first=False)
    other.load_state_dict(it.state_dict())
    torch.testing.assert_close(other(x.transpose(0, 1), memory.transpose(0, 1)).transpose(0, 1), it(x, memory))


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"clamp_len": 3}], ids=["plain", "window", "clamp_len"])
@pytest.mark.parametrize("cuts", [[L * 4], [L] * 4, [1] * 24, [5, 1, 7, 2, 9]], ids=str)
@pytest.mark.parametrize("mem_len", [0, 1, 7])
def test_cache_equals_hidden_state_memory(options: dict[str, int], cuts: list[int], mem_len: int) -> None:
    it, text = layer(**options), hidden(24)
    cache = it.new_cache(B, mem_len, max(cuts))
    memory, first = text[:, :0], 0
    for n in cuts:
        x = text[:, first : first + n]
        want = it(x, memory)
        with torch.no_grad():
            got = it(x, cache=cache)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        first += n
        memory = text[:, max(first - mem_len, 0) : first]
        assert len(cache) == memory.size(1)


def test_chunks_stream_as_all_at_once() -> None:
    """A chunk sees itself ahead; the cache holds as many chunks as a query sees before its own."""
    it, text = layer(causal=False, chunk=(3, 2), clamp_len=4), hidden(17)
    cache = it.new_cache(B, 6, 3)
    with torch.no_grad():
        whole = it(text)
        parts = [it(part, cache=cache) for part in text.split(3, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole)
        at = torch.arange(17) // 3
        start, end = (at - 2).clamp(min=0) * 3, ((at + 1) * 3).clamp(max=17)
        plain = layer(causal=False, clamp_len=4)
        plain.load_state_dict(it.state_dict())
        torch.testing.assert_close(plain(text, start=start[None].int(), end=end[None].int()), whole)
    with pytest.raises(ValueError, match="max_segment must be the size of a chunk, 3, got 4"):
        it.new_cache(B, 6, 4)
    with pytest.raises(ValueError, match="chunk needs causal=False"):
        layer(chunk=(3, 2))


def test_bidirectional_needs_no_table_from_the_user() -> None:
    it, x = layer(causal=False), hidden(L)
    end = torch.tensor([[4], [6]], dtype=torch.int32)
    out = it(x, end=end)
    alone = it(x[:1, :4])
    torch.testing.assert_close(out[:1, :4], alone)
    with pytest.raises(ValueError, match="a key/value cache needs causal=True"):
        it.new_cache(1, 4, 4)


def test_empty_segment() -> None:
    for causal in (True, False):
        assert layer(causal=causal)(hidden(0)).shape == (B, 0, WIDTH)


def test_shared_biases_are_one_parameter() -> None:
    bias = nn.Parameter(torch.zeros(HEADS, 4))
    net = nn.ModuleList(RelAttention(WIDTH, HEADS, 4, content_bias=bias, position_bias=bias) for _ in range(3))
    assert sum(p is bias for p in net.parameters()) == 1


def test_attention_dropout_only_in_training() -> None:
    it, x = layer(attn_dropout=0.5), hidden(L)
    assert torch.equal(it(x), it(x))
    it.train()
    assert not torch.equal(it(x), it(x))


def test_positions_may_be_shared_and_dropped() -> None:
    it, x, memory = layer(), hidden(L), hidden(M)
    positions = sinusoid(torch.arange(M + L), WIDTH, torch.float64)
    torch.testing.assert_close(it(x, memory, positions=positions), it(x, memory))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2), "d_model must be an integer >= 1, got 0"),
        ((7, 1), r"d_model must be even .*, got 7"),
        ((12, 5), "d_model must be a multiple of n_head when d_head is not given, got 12, 5"),
    ],
)
def test_bad_sizes(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        RelAttention(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_dropout": 1.0}, r"attn_dropout must be in \[0, 1\), got 1.0"),
        ({"clamp_len": -1}, "clamp_len must be None or >= 0, got -1"),
        ({"content_bias": nn.Parameter(torch.zeros(3))}, r"content_bias must be \[H, D\] = \[3, 4\], got shape \[3\]"),
        ({"window": 0}, r"window must be None or an integer >= 1 .*, got 0"),
        ({"n_kv_head": 0}, "n_kv_head must be None or an integer >= 1, got 0"),
        ({"n_kv_head": 2}, "n_kv_head must be a divisor of n_head=3, got 2"),
        ({"chunk": (4, 1)}, r"chunk needs causal=False"),
        ({"backend": "natve"}, r"backend must be None or one of native, .*, got 'natve'"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    """When the layer is made, not at its first use."""
    with pytest.raises((TypeError, ValueError), match=message):
        RelAttention(WIDTH, HEADS, 4, **options)


def test_parameters_can_be_initialised_after_to_empty() -> None:
    made = RelAttention(WIDTH, HEADS, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(torch.nan)
    made.reset_parameters()
    assert all(p.isfinite().all() for p in made.parameters())
    assert not made.content_bias.any()
    assert not made.position_bias.any()
    assert made.qkv.weight.any()


def test_what_does_not_fit_a_cache_is_refused_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layer's own words: its user has never seen k, v or r."""
    it, other = layer(), RelAttention(WIDTH, 2, dtype=torch.float64).eval()
    cache = it.new_cache(B, 4, 3)
    monkeypatch.setattr("txl_kernels.attention_layer.rel_attention", None)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"x must be a segment of at most max_segment=3 .*got shape \[2, 4, 12\]"):
            it(hidden(4), cache=cache)
        with pytest.raises(ValueError, match=r"x must have the cache's batch 2, got shape \[3, 2, 12\]"):
            it(hidden(2, 3), cache=cache)
        with pytest.raises(ValueError, match=r"memory must have the cache's batch 2, got shape \[1, 2, 12\]"):
            it.fill_cache(cache, hidden(2, 1))
        with pytest.raises(
            ValueError,
            match=r"cache must be this layer's, with n_kv_head, d_key and d_value \(2, 6, 6\), got one with \(3, 4, 4\)",
        ):
            other(hidden(2), cache=cache)
        with pytest.raises(TypeError, match=r"cache must have x's dtype torch\.float32, got torch\.float64"):
            it(hidden(2).float(), cache=cache)
    assert len(cache) == 0


def test_memory_of_another_dtype_is_named() -> None:
    it = layer().bfloat16()
    with pytest.raises(TypeError, match=r"memory must have x's dtype torch\.bfloat16, got torch\.float32"):
        it(hidden(L).bfloat16(), hidden(M).float())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer().float()(hidden(L).bfloat16(), hidden(M).float()).dtype == torch.bfloat16


def test_bad_calls() -> None:
    it = layer()
    cache = it.new_cache(B, 4, 3)
    with pytest.raises(ValueError, match=r"x must be \[B, L, d_model\] with d_model=12, got shape \[2, 6\]"):
        it(torch.zeros(2, 6, dtype=torch.float64))
    with pytest.raises(
        ValueError, match=r"memory must be like x but for its length, got \[1, 5, 12\] for \[2, 6, 12\]"
    ):
        it(hidden(L), hidden(M, 1))
    with pytest.raises(ValueError, match=r"memory must be three-dimensional with d_model=12, got \[2, 5, 13\]"):
        it(hidden(L), torch.zeros(2, 5, 13, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="cache is for evaluation"):
        it(hidden(3), cache=cache)
    with torch.no_grad(), pytest.raises(ValueError, match="cache must be given alone"):
        it(hidden(3), hidden(M), cache=cache)
    with pytest.raises(ValueError, match="max_segment must be an integer >= 1, got 0"):
        it.new_cache(1, 4, 0)


@pytest.mark.parametrize(("distances", "width"), [(torch.arange(3), 5), (torch.arange(3), 0), (torch.zeros(2, 2), 4)])
def test_bad_sinusoids(distances: torch.Tensor, width: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        sinusoid(distances, width)


def test_sinusoids_are_exact_in_half_precision() -> None:
    far = torch.tensor([3927])
    want = sinusoid(far, 64, torch.float64)
    assert (sinusoid(far, 64, torch.bfloat16).double() - want).abs().max() < 2**-8


@pytest.mark.parametrize("shape", [(2, 5, 16), (5, 14), (16,)], ids=str)
def test_positions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Of [B, T, d] the first row would have been taken for all."""
    layer = RelAttention(16, 2)
    with pytest.raises(ValueError, match=r"positions must be \[T, d_model\] with d_model=16, .*got shape"):
        layer(torch.randn(2, 5, 16), positions=torch.randn(shape))


def test_a_bad_window_of_a_cache() -> None:
    with pytest.raises(ValueError, match="window must be None or"):
        RelAttention(16, 2).new_cache(1, 4, 4, window=0)


def test_an_absurd_zero_row() -> None:
    q, r, u = torch.randn(1, 2, 4, 8), torch.randn(2, 8, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"zero_row must be an integer from 0 to 2\*\*31 - 1"):
        rel_attention(q, q, q, r, u, u, zero_row=2**70)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"causal": False}, {"clamp_len": 3}], ids=str)
def test_weights_are_those_of_forward(options: dict[str, object]) -> None:
    it, x, memory = layer(**options), hidden(L), hidden(M)
    weights = it.weights(x, memory)
    _, _, values = torch.cat([memory, x], 1).matmul(it.qkv.weight.T).split(12, -1)
    attended = (weights @ values.unflatten(-1, (HEADS, 4)).transpose(1, 2)).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(it.out(attended), it(x, memory))
    torch.testing.assert_close(it.weights(x).sum(-1), torch.ones(B, HEADS, L, dtype=torch.float64))


def test_weights_of_a_layer_with_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk must be None"):
        layer(causal=False, chunk=(3, 1)).weights(hidden(L))


def test_rows_of_a_cache_in_another_order() -> None:
    """As if each row had been another from the beginning; rows begun anew keep their beginning."""
    it, text, more = layer(), hidden(6, 3), hidden(3, 3)
    rows = torch.tensor([2, 0, 0])
    caches = [it.new_cache(3, 4, 3) for _ in range(2)]
    with torch.no_grad():
        for cache, order in zip(caches, (torch.arange(3), rows), strict=True):
            it(text[order, :3], cache=cache)
            cache.reset(torch.tensor([False, False, True])[order])
            it(text[order, 3:], cache=cache)
        caches[0].reorder(rows)
        torch.testing.assert_close(it(more, cache=caches[0]), it(more, cache=caches[1]))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0, 1, 2], TypeError, "rows must be an int64 tensor"),
        (torch.zeros(3, dtype=torch.int32), TypeError, r"got torch\.int32"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"rows must be \[B\] = \[3\]"),
        (torch.tensor([0, 1, 3]), ValueError, "rows must be from 0 to 2, got 0 to 3"),
    ],
    ids=["list", "int32", "length", "range"],
)
def test_a_bad_order_of_rows(rows: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer().new_cache(3, 4, 3).reorder(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"batch_first": False}], ids=str)
def test_odd_widths_are_padded_where_a_gpu_wants_it(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    it, widths = RelAttention(82, 2, **options).double(), []
    x, memory = (torch.randn(2, n, 82, dtype=torch.float64) for n in (5, 4))
    if not it.batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    real = layers.rel_attention

    def seen(q: torch.Tensor, *rest: Any, **named: Any) -> Any:
        widths.append(q.size(-1))
        return real(q, *rest, **named)

    monkeypatch.setattr(layers, "rel_attention", seen)
    expected = it(x, memory)
    want = torch.autograd.grad(expected.square().sum(), [*it.parameters()])
    monkeypatch.setattr(layers, "loads_by_units", lambda device: True)
    found = it(x, memory)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), [*it.parameters()]), want)
    assert widths == [41, 48]
