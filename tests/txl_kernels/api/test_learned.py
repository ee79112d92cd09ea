"""LearnedRelativeAttention against the formula written out with scaled_dot_product_attention, its
caches, and what it refuses."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels import KeyValueCache, LearnedRelativeAttention
from txl_kernels import attention_layer as layers

B, L, M, WIDTH, HEADS, EXTENT = 2, 9, 5, 12, 4, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"n_kv_head": 2},
    "one key head": {"n_kv_head": 1},
    "norms": {"qk_norm": True},
    "sink": {"sink": True},
    "window": {"window": 4},
    "scale": {"scale": 0.125, "position_width": 3},
    "wide heads": {"d_head": 5, "position_width": 8},
    "both sides": {"causal": False},
    "all": {"n_kv_head": 2, "qk_norm": True, "sink": True, "window": (7, 0), "scale": 0.2, "position_width": 2},
}
each = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
TRACED = ("plain", "both sides", "all")
each_traced = pytest.mark.parametrize("options", [OPTIONS[name] for name in TRACED], ids=TRACED)


def layer(**options: Any) -> LearnedRelativeAttention:
    made = LearnedRelativeAttention(WIDTH, HEADS, extent=EXTENT, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1 or parameter is made.table:
                parameter.add_(torch.randn_like(parameter))
    return made.eval()


def hidden(length: int, batch: int = B) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def written_out(it: LearnedRelativeAttention, x: Tensor) -> Tensor:
    """The layer's result for x [B, L, d_model], from a bias [B, H, L, L]; a sink is one more
    key."""
    length = x.size(1)
    width, kv = HEADS * it.d_head, it.n_kv_head * it.d_head
    q, k, v = (
        y.unflatten(-1, (-1, it.d_head)).transpose(1, 2) for y in (x @ it.qkv.weight.T).split([width, kv, kv], -1)
    )
    if it.q_norm is not None:
        q, k = F.rms_norm(q, (it.d_head,), it.q_norm.weight), F.rms_norm(k, (it.d_head,), it.k_norm.weight)
    p = (x @ it.p.weight.T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    d = torch.arange(length)[:, None] - torch.arange(length)
    row = d if it.causal else d + EXTENT - 1
    known = (row >= 0) & (row < len(it.table))
    bias = torch.einsum("bhip,ijp->bhij", p, it.table[row.clamp(0, len(it.table) - 1)]) * known
    left = it.window if it.window is None or isinstance(it.window, tuple) else (it.window - 1, None)
    hides = torch.zeros_like(known) if left is None else d > left[0]
    bias = bias.masked_fill(hides | (d < 0) if it.causal else hides, -torch.inf)
    if it.sink is not None:
        bias = torch.cat([it.sink[:, None, None].expand(len(x), -1, length, 1), bias], -1)
        k, v = (F.pad(y, (0, 0, 1, 0)) for y in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, bias, scale=it.scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(-2) @ it.out.weight.T


@each
def test_the_formula_and_its_gradients(options: dict[str, Any]) -> None:
    it, x, weight = layer(**options), hidden(L).requires_grad_(), hidden(L)
    found, want = it(x), written_out(it, x)
    torch.testing.assert_close(found, want)
    leaves = [x, *it.parameters()]
    gradients = [torch.autograd.grad((y * weight).sum(), leaves) for y in (found, want)]
    for (name, _), a, b in zip([("x", x), *it.named_parameters()], *gradients, strict=True):
        assert b.any(), name
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


@each
def test_a_memory_is_the_sequence_before(options: dict[str, Any]) -> None:
    it, x = layer(**options), hidden(M + L)
    if it.causal:
        torch.testing.assert_close(it(x[:, M:], x[:, :M]), written_out(it, x)[:, M:])
    weights = it.weights(x)
    total = torch.ones(B, HEADS, M + L, dtype=torch.float64)
    assert (
        (weights.sum(-1) < 1).all() if it.sink is not None else torch.equal(weights.sum(-1).round(decimals=12), total)
    )


@pytest.mark.parametrize("cuts", [[L * 3], [1] * 27, [5, 1, 7, 2, 12]], ids=str)
@each
@torch.no_grad()
def test_a_cache_gives_what_one_call_gives(options: dict[str, Any], cuts: list[int]) -> None:
    """Generation: the positions before are keys and values in the cache, of as many heads as the
    layer's."""
    it, text = layer(**options), hidden(27)
    if not it.causal:
        with pytest.raises(ValueError, match="a key/value cache needs causal=True"):
            it.new_cache(B, 27, 27)
        return
    reach = 26 if it.window is None else 7
    cache = it.new_cache(B, reach, max(cuts))
    parts = [it(part, cache=cache) for part in text.split(cuts, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), written_out(it, text))
    assert cache.r is None
    assert cache.memory[0].shape == (B, it.n_kv_head, reach, it.d_head)
    filled = it.new_cache(B, reach, 4)
    it.fill_cache(filled, text)
    torch.testing.assert_close(filled.memory, cache.memory)


@each
def test_packed_sequences_are_each_alone(options: dict[str, Any]) -> None:
    it, lengths = layer(**options), (7, 1, 0, 12, 5)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    x = hidden(sum(lengths), 1)
    want = torch.cat([written_out(it, part) for part in x.split(lengths, 1)], 1)
    torch.testing.assert_close(it(x, cu_seqlens=ends), want)


def test_an_untrained_layer_ignores_positions() -> None:
    """With the table at zero it is plain attention; the table's gradient is not zero."""
    it, x = LearnedRelativeAttention(WIDTH, HEADS, extent=EXTENT, dtype=torch.float64), hidden(L)
    q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in it.qkv(x).chunk(3, -1))
    out = it(x)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, it.out(plain.transpose(1, 2).flatten(-2)))
    assert torch.autograd.grad(out.square().sum(), it.table)[0].any()


def test_autocast() -> None:
    it = layer(n_kv_head=2, qk_norm=True, sink=True, backend="reference").float()
    x = hidden(L).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = it(x)
        with torch.no_grad():
            cached = it(x, cache=it.new_cache(B, 4, L, like=found))
    assert found.dtype == cached.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), written_out(it, x), rtol=0.05, atol=0.05)
    torch.testing.assert_close(cached, found)


def test_parameters() -> None:
    it = LearnedRelativeAttention(64, 4, 8, extent=10, n_kv_head=2, qk_norm=True, sink=True)
    assert {name: tuple(p.shape) for name, p in it.named_parameters()} == {
        "qkv.weight": ((4 + 2 + 2) * 8, 64), "p.weight": (4 * 16, 64), "out.weight": (64, 32), "table": (10, 16),
        "q_norm.weight": (8,), "k_norm.weight": (8,), "sink": (4,),
    }  # fmt: skip
    plain = LearnedRelativeAttention(
        64, 4, extent=10, causal=False, position_width=3, dtype=torch.bfloat16, device="meta"
    )
    assert {name: tuple(p.shape) for name, p in plain.named_parameters()} == {
        "qkv.weight": (192, 64), "p.weight": (12, 64), "out.weight": (64, 64), "table": (19, 3),
    }  # fmt: skip
    assert {(p.dtype, p.device.type) for p in plain.parameters()} == {(torch.bfloat16, "meta")}


def test_parameters_can_be_initialised_after_to_empty() -> None:
    made = LearnedRelativeAttention(WIDTH, HEADS, extent=EXTENT, qk_norm=True, sink=True, device="meta").to_empty(
        device="cpu"
    )
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(torch.nan)
    made.reset_parameters()
    assert all(p.isfinite().all() for p in made.parameters())
    assert made.qkv.weight.any()
    assert made.p.weight.any()
    assert not made.table.any()
    assert not made.sink.any()
    assert (made.q_norm.weight == 1).all()


def test_repr_shows_every_option() -> None:
    shown = repr(layer(n_kv_head=2, window=4, scale=0.5, sink=True, qk_norm=True, position_width=8, attn_dropout=0.1))
    for words in (
        "n_kv_head=2", "window=4", "scale=0.5", "sink=True", "qk_norm=True", "position_width=8", "attn_dropout=0.1",
        f"extent={EXTENT}", "causal=True", "chunk=None", "batch_first=True", "backend=None",
    ):  # fmt: skip
        assert words in shown


@each_traced
def test_a_compiled_layer(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    it, x, memory = layer(**options), hidden(L), hidden(M)
    weight = torch.randn_like(x)
    compiled = torch.compile(it, fullgraph=True, backend="aot_eager")
    found, want = compiled(x, memory), it(x, memory)
    torch.testing.assert_close(found, want)
    got, expected = (torch.autograd.grad((y * weight).sum(), [*it.parameters()]) for y in (found, want))
    torch.testing.assert_close(got, expected)


@each_traced
def test_one_exported_graph(options: dict[str, Any]) -> None:
    it = layer(**options)
    shapes = ({1: torch.export.Dim("length", max=4096)},)
    program = torch.export.export(it, (hidden(8),), dynamic_shapes=shapes).module()
    for length in (1, 4, 16, 17):
        x = hidden(length)
        torch.testing.assert_close(program(x), it(x))


def test_odd_widths_are_padded_where_a_gpu_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    it, widths = layer(d_head=5, position_width=3, n_kv_head=2, sink=True), []
    x, memory = hidden(L), hidden(M)
    real = layers.rel_attention

    def seen(q: Tensor, *rest: Any, **named: Any) -> Any:
        widths.append((q.size(-1), named["q_pos"].size(-1)))
        return real(q, *rest, **named)

    monkeypatch.setattr(layers, "rel_attention", seen)
    expected = it(x, memory)
    want = torch.autograd.grad(expected.square().sum(), [*it.parameters()])
    monkeypatch.setattr(layers, "loads_by_units", lambda device: True)
    found = it(x, memory)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), [*it.parameters()]), want)
    assert widths == [(5, 3), (8, 8)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extent": 0}, "extent must be an integer >= 1, got 0"),
        ({"position_width": 0}, "position_width must be an integer >= 1, got 0"),
        ({"qk_norm": 1}, "qk_norm must be True or False, got int"),
        ({"sink": torch.zeros(4)}, "sink must be True or False, got Tensor"),
        ({"scale": float("inf")}, "scale must be None or a finite number .*, got inf"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LearnedRelativeAttention(WIDTH, HEADS, **{"extent": EXTENT, **options})


@torch.no_grad()
def test_a_cache_with_a_table_is_refused() -> None:
    layer = LearnedRelativeAttention(16, 2, extent=5, backend="reference").double().eval()
    cache = KeyValueCache(torch.zeros(2, 9, 16, dtype=torch.float64), 1, 5, 4, n_kv_head=2, d_key=8)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"cache must hold no table r, .* got r of shape \[2, 9, 16\]"),
    ):
        layer(torch.zeros(1, 3, 16, dtype=torch.float64), cache=cache)
