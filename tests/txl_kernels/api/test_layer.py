"""RelAttention and LearnedRelativeAttention: values, gradients, memory, packed sequences, graphs,
options, errors. Caches are in test_cached_layers.py."""

import itertools
from typing import Any

import pytest
import torch
from layers import EXTENT, HEADS, OPTIONS, WIDTH, definition, hidden, layer, run
from torch import Tensor, nn

from txl_kernels import LearnedRelativeAttention, RelAttention, sinusoid
from txl_kernels import attention_layer as layers

B, L, M = 2, 9, 5
each = pytest.mark.parametrize("name", OPTIONS)


def slowly(*names: str) -> list[Any]:
    """Return values of a parameter that `make test` leaves out."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def gradients_of(it: nn.Module, out: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
    """Gradients of a fixed random functional in the inputs and all parameters."""
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    leaves = dict(enumerate(inputs)) | dict(it.named_parameters())
    return dict(zip(leaves, torch.autograd.grad((out * weight).sum(), list(leaves.values())), strict=True))


@each
def test_values_and_gradients(name: str) -> None:
    it, x = layer(name), hidden(L).requires_grad_()
    found, (want, _) = run(it, x), definition(it, x)
    torch.testing.assert_close(found, want)
    wanted = gradients_of(it, want, x)
    assert all(gradient.any() for gradient in wanted.values())
    torch.testing.assert_close(gradients_of(it, found, x), wanted)


@each
def test_memory_is_the_sequence_before(name: str) -> None:
    it, x = layer(name), hidden(M + L)
    want, weights = definition(it, x)
    if it.causal:
        torch.testing.assert_close(run(it, x[:, M:], x[:, :M]), want[:, M:])
    if it.chunk is not None:
        with pytest.raises(ValueError, match="chunk must be None"):
            it.weights(x)
    elif it.batch_first:
        torch.testing.assert_close(it.weights(x), weights)
        if it.causal:
            torch.testing.assert_close(it.weights(x[:, M:], x[:, :M]), weights[:, :, M:])


@each
def test_packed_sequences(name: str) -> None:
    """Each is computed as if it was alone; gradients, too."""
    it, lengths = layer(name), (7, 1, 0, 12, 5)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    x = hidden(sum(lengths), 1).requires_grad_()
    if it.chunk is not None:
        with pytest.raises(ValueError, match="chunk must be None with cu_seqlens"):
            it(x, cu_seqlens=ends)
        return
    found, alone = run(it, x, cu_seqlens=ends), torch.cat([run(it, part) for part in x.split(lengths, 1)], 1)
    torch.testing.assert_close(found, alone)
    torch.testing.assert_close(gradients_of(it, found, x), gradients_of(it, alone, x))


@pytest.mark.parametrize("name", ["grouped", "learned", *slowly("learned, bidirectional", "learned, every option")])
def test_compiled_layer(name: str) -> None:
    torch.compiler.reset()
    it, x, memory = layer(name, batch_first=True), hidden(L), hidden(M)
    compiled = torch.compile(it, fullgraph=True, backend="aot_eager")
    found, want = compiled(x, memory), it(x, memory)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(gradients_of(it, found), gradients_of(it, want))


def test_compiled_layer_with_packed_sequences() -> None:
    torch.compiler.reset()
    it, x, ends = layer(), hidden(25, 1), torch.tensor([0, 7, 8, 8, 20, 25])
    compiled = torch.compile(it, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cu_seqlens=ends), it(x, cu_seqlens=ends))


@pytest.mark.parametrize("name", ["bidirectional", "learned, every option", *slowly("window", "learned")])
def test_one_exported_graph_serves_all_lengths(name: str) -> None:
    it = layer(name, batch_first=True)
    shapes = ({1: torch.export.Dim("length", max=4096)},)
    program = torch.export.export(it, (hidden(8),), dynamic_shapes=shapes).module()
    for length in (1, 4, 16, 17):
        x = hidden(length)
        torch.testing.assert_close(program(x), it(x))


@pytest.mark.parametrize("name", ["window", *slowly("bidirectional", "learned, window", "learned, every option")])
def test_one_exported_graph_serves_all_memories(name: str) -> None:
    """With gradients, for which the layer looks for positions that no query sees."""
    it = layer(name, batch_first=True)
    length, memory_len = torch.export.Dim("length", max=4096), torch.export.Dim("memory_len", max=4096)
    example = hidden(8), hidden(5)
    program = torch.export.export(it, example, dynamic_shapes=({1: length}, {1: memory_len})).module()
    for sizes in ((1, 16), (16, 3), (17, 40)):
        given = [hidden(size) for size in sizes]
        torch.testing.assert_close(program(*given), it(*given))


@torch.no_grad()
def test_a_graph_exported_without_gradients_serves_all_memories() -> None:
    """Products of more and of fewer than 2^22 multiply-adds, from where oneDNN may compute them."""
    it = layer(d_head=16, dtype=torch.float32, batch_first=True)
    length, memory_len = torch.export.Dim("length", max=9000), torch.export.Dim("memory_len", max=9000)
    example = hidden(8).float(), hidden(5).float()
    program = torch.export.export(it, example, dynamic_shapes=({1: length}, {1: memory_len})).module()
    for sizes in ((16, 3), (17, 3000)):
        given = [hidden(size).float() for size in sizes]
        torch.testing.assert_close(program(*given), it(*given))


@pytest.mark.parametrize("name", ["plain", "bidirectional", "length first", "learned, every option"])
def test_unaligned_widths_are_padded_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it, widths = layer(name, d_head=5), []
    x, memory = hidden(L), hidden(M)
    real = layers.rel_attention

    def recorded(q: Tensor, *rest: Any, **named: Any) -> Any:
        widths.append(q.size(-1))
        return real(q, *rest, **named)

    monkeypatch.setattr(layers, "rel_attention", recorded)
    expected = run(it, x, memory)
    monkeypatch.setattr(layers, "loads_by_units", lambda device: True)
    found = run(it, x, memory)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients_of(it, found), gradients_of(it, expected))
    assert widths == [5, 8]


def test_end_hides_padding() -> None:
    it, x = layer("bidirectional"), hidden(L)
    out = it(x, end=torch.tensor([[4], [L]], dtype=torch.int32))
    torch.testing.assert_close(out[:1, :4], it(x[:1, :4]))


def test_empty_segment() -> None:
    for causal in (True, False):
        assert layer(causal=causal)(hidden(0)).shape == (B, 0, WIDTH)


def test_attention_dropout_only_in_training() -> None:
    it, x = layer(attn_dropout=0.5), hidden(L)
    assert torch.equal(it(x), it(x))
    it.train()
    assert not torch.equal(it(x), it(x))


def test_given_positions() -> None:
    it, x, memory = layer(), hidden(L), hidden(M)
    positions = sinusoid(torch.arange(M + L), WIDTH, torch.float64)
    torch.testing.assert_close(it(x, memory, positions=positions), it(x, memory))


def test_autocast() -> None:
    it = layer("learned, every option", batch_first=True, backend="reference").float()
    x = hidden(L).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = it(x)
        with torch.no_grad():
            cached = it(x, cache=it.new_cache(B, 4, L, like=found))
    assert found.dtype == cached.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), definition(it.double(), x.double())[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(cached, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_under_autocast(dtype: torch.dtype) -> None:
    """They are float32, as the softmax of `forward` is, also where a score is beyond float16."""
    it, x = layer().float(), hidden(L).float()
    it.qkv.weight.detach().mul_(100)
    with torch.autocast("cpu", dtype):
        p = it.weights(x)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.sum(-1), torch.ones(B, HEADS, L))


def test_parameters() -> None:
    it = LearnedRelativeAttention(64, 4, 8, extent=10, n_kv_head=2, qk_norm=True, sink=True)
    assert {name: tuple(p.shape) for name, p in it.named_parameters()} == {
        "qkv.weight": ((4 + 2 + 2) * 8, 64), "p.weight": (4 * 16, 64), "out.weight": (64, 32), "table": (10, 16),
        "q_norm.weight": (8,), "k_norm.weight": (8,), "sink": (4,),
    }  # fmt: skip
    options: dict[str, Any] = {"causal": False, "position_width": 3, "dtype": torch.bfloat16, "device": "meta"}
    plain = LearnedRelativeAttention(64, 4, extent=10, **options)
    assert {name: tuple(p.shape) for name, p in plain.named_parameters()} == {
        "qkv.weight": (192, 64), "p.weight": (12, 64), "out.weight": (64, 64), "table": (19, 3),
    }  # fmt: skip
    assert {(p.dtype, p.device.type) for p in plain.parameters()} == {(torch.bfloat16, "meta")}


@pytest.mark.parametrize("name", ["plain", "learned, every option"])
def test_parameters_can_be_initialized_after_to_empty(name: str) -> None:
    it = layer(name, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for p in it.parameters():
            p.fill_(torch.nan)
    it.reset_parameters()
    zeros, ones = ("content_bias", "position_bias", "table", "sink"), ("q_norm.weight", "k_norm.weight")
    for parameter, x in it.named_parameters():
        assert x.isfinite().all()
        assert x.any() == (parameter not in zeros)
        assert parameter not in ones or (x == 1).all()


BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "d_model must be an integer >= 1, got 0": {"d_model": 0},
    "d_model must be even .*, got 7": {"d_model": 7, "n_head": 1},
    "d_model must be a multiple of n_head when d_head is not given, got 12, 5": {"n_head": 5},
    r"attn_dropout must be in \[0, 1\), got 1.0": {"attn_dropout": 1.0},
    "clamp_len must be None or >= 0, got -1": {"clamp_len": -1},
    r"content_bias must be \[H, D\] = \[4, 3\], got shape \[3\]": {"content_bias": nn.Parameter(torch.zeros(3))},
    "window must be None or an integer >= 1 .*, got 0": {"window": 0},
    "n_kv_head must be a divisor of n_head=4, got 3": {"n_kv_head": 3},
    "extent must be an integer >= 1, got 0": {"extent": 0},
    "qk_norm must be True or False, got int": {"extent": EXTENT, "qk_norm": 1},
    "sink must be True or False, got Tensor": {"extent": EXTENT, "sink": torch.zeros(4)},
    "batch_first must be True or False, got str": {"batch_first": "no"},
    "content_bias must be None or an nn.Parameter, got Tensor": {"content_bias": torch.zeros(4, 3)},
    "position_bias must be None or an nn.Parameter, got int": {"position_bias": 3},
    "bias must be True or False, got NoneType": {"bias": None},
    "^RelAttention takes no argument num_heads; pass n_head$": {"num_heads": 4},
    "^RelAttention takes no argument dropout; pass dropout_p, to a layer attn_dropout, and no embed_dim; pass d_model$": {
        "dropout": 0.1,
        "embed_dim": 12,
    },
    "^LearnedRelativeAttention takes no argument head_dim; pass d_head$": {"extent": EXTENT, "head_dim": 3},
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_bad_options(message: str) -> None:
    options = {"d_model": WIDTH, "n_head": HEADS} | BAD_OPTIONS[message]
    with pytest.raises((TypeError, ValueError), match=message):
        (LearnedRelativeAttention if "extent" in options else RelAttention)(**options)


ENDS = torch.tensor([0, 7, 8, 20])
BAD_CALLS: dict[str, dict[str, Any]] = {
    "x must be a torch.Tensor, got list": {"x": [1.0]},
    "memory must be a torch.Tensor, got tuple": {"memory": (hidden(M, 1), hidden(M, 1))},
    "positions must be a torch.Tensor, got int": {"positions": 3},
    "cache must be None or a KeyValueCache of new_cache, got dict": {"cache": {}},
    r"x must be \[B, L, d_model\] with d_model=12, got shape \[2, 6\]": {"x": torch.zeros(2, 6)},
    r"memory must be like x but for its length, got \[2, 5, 12\] for \[1, 20, 12\]": {"memory": hidden(M)},
    r"memory must be three-dimensional with d_model=12, got \[1, 5, 13\]": {"memory": torch.zeros(1, 5, 13)},
    r"memory must have x's dtype torch\.float64, got torch\.float32": {"memory": hidden(M, 1).float()},
    r"positions must be \[T, d_model\] with d_model=12, .*got shape \[1, 20, 12\]": {"positions": hidden(20, 1)},
    r"positions must be .*got shape \[12\]": {"positions": torch.zeros(12)},
    r"^RelAttention takes no argument attn_mask; pass start and end, .* txl_kernels\.intervals": {
        "attn_mask": torch.ones(3, 3)
    },
    "^RelAttention takes no argument need_weights; pass nothing: .* weights": {"need_weights": False},
    "^RelAttention takes no argument memry$": {"memry": hidden(M)},
    "memory must be None with cu_seqlens": {"memory": hidden(3, 1), "cu_seqlens": ENDS},
    "cache must be None with cu_seqlens": {"cache": layer().new_cache(1, 4, 20), "cu_seqlens": ENDS},
    r"x must be one row \(B = 1\) with cu_seqlens": {"x": hidden(20), "cu_seqlens": ENDS},
    "cu_seqlens must be on x's device cpu, got meta": {"cu_seqlens": ENDS.to("meta")},
    "at most total=20, got 0 to 21": {"cu_seqlens": torch.tensor([0, 21])},
    "must rise from 0 .*, got 1 to 20": {"cu_seqlens": torch.tensor([1, 20])},
    "must rise from 0 .*, with a step down": {"cu_seqlens": torch.tensor([0, 9, 5])},
    r"cu_seqlens must be \[sequences \+ 1\], got shape \[0\]": {"cu_seqlens": torch.zeros(0, dtype=torch.int32)},
    "cu_seqlens must be an int32 or int64 tensor .*, got list": {"cu_seqlens": [0, 20]},
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        layer()(**{"x": hidden(20, 1)} | BAD_CALLS[message])


def test_query_key_and_value_are_refused() -> None:
    x = hidden(L)
    with pytest.raises(
        TypeError, match=r"takes x and memory, hidden states that it projects .* got 3 positional arguments"
    ):
        layer()(x, x, x)


def test_biases_of_projections() -> None:
    """Those of nn.Linear, in the state dict and anew by reset_parameters; without, none."""
    plain, it = RelAttention(WIDTH, HEADS), RelAttention(WIDTH, HEADS, bias=True)
    assert it.state_dict().keys() - plain.state_dict().keys() == {"qkv.bias", "out.bias"}
    for projection in (it.qkv, it.out):
        with torch.no_grad():
            projection.bias.fill_(9.0)
    it.reset_parameters()
    for projection in (it.qkv, it.out):
        assert 0 < float(projection.bias.detach().abs().max()) <= WIDTH**-0.5


@pytest.mark.parametrize("bound", ["start", "end"])
def test_memory_beside_one_bound_of_each_batch_row(bound: str) -> None:
    """With gradients, for which the layer looks for positions that no query sees."""
    it, x, memory = layer(batch_first=True), hidden(L), hidden(M)
    value = torch.tensor([[2], [M]] if bound == "start" else [[M + 1], [M + L]], dtype=torch.int32)
    with torch.no_grad():
        want = it(x, memory, **{bound: value})
    torch.testing.assert_close(it(x, memory, **{bound: value}), want)


def test_memory_of_another_dtype_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert layer().float()(hidden(L).bfloat16(), hidden(M).float()).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    """The message names packed sequences, which give the same result."""
    it, parts = layer(), [hidden(n, 1)[0] for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    with pytest.raises(
        TypeError, match=r"x must be a dense tensor, got a nested tensor: pass x\.values\(\)\[None\] with"
    ):
        it(nested)
    with pytest.raises(TypeError, match="memory must be a dense tensor, got a nested tensor"):
        it(hidden(3), nested)
    if layout == torch.jagged:
        found = it(nested.values()[None], cu_seqlens=nested.offsets())[0]
        torch.testing.assert_close(found, torch.cat([it(part[None])[0] for part in parts]))


@pytest.mark.parametrize(
    ("distances", "width", "message"),
    [(torch.arange(3), 5, "even"), (torch.arange(3), 0, "positive"), (torch.zeros(2, 2), 4, "one-dimensional"),
     (10, 64, r"distances must be a tensor \[T\], got int; pass torch\.arange")],
)  # fmt: skip
def test_bad_sinusoids(distances: Any, width: int, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        sinusoid(distances, width)


def test_sinusoids_are_exact_in_half_precision() -> None:
    far = torch.tensor([3927])
    want = sinusoid(far, 64, torch.float64)
    assert (sinusoid(far, 64, torch.bfloat16).double() - want).abs().max() < 2**-8
