"""Layers whose projections are wrapped, hooked, reparametrized or quantized: what acts on a module
acts on the segment and on the memory alike, and reaches every method."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from txl_kernels import KeyValueCache, RelAttention, rel_attention, start_from_lengths
from txl_kernels.linear import plain_weight, project

B, M, L, WIDTH = 2, 6, 8, 32


class Adapter(nn.Module):
    """LoRA of rank 4 around a linear layer, without a `weight` of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def wrap(layer: RelAttention) -> None:
    for name in ("qkv", "r", "out"):
        setattr(layer, name, Adapter(getattr(layer, name)))


def hook(layer: RelAttention) -> None:
    for module in (layer.qkv, layer.r, layer.out):
        module.register_forward_hook(lambda module, arguments, output: 2 * output)


def hook_before(layer: RelAttention) -> None:
    for module in (layer.qkv, layer.r, layer.out):
        module.register_forward_pre_hook(lambda module, arguments: (3 * arguments[0],))


def replace_forward(layer: RelAttention) -> None:
    """As accelerate's hooks do."""
    for module in (layer.qkv, layer.r, layer.out):
        module.forward = lambda x, forward=module.forward: -forward(x)  # type: ignore[method-assign]


def each(change: Callable[[nn.Module], object]) -> Callable[[RelAttention], None]:
    def changed(layer: RelAttention) -> None:
        for module in (layer.qkv, layer.r, layer.out):
            change(module)

    return changed


def halve(layer: RelAttention) -> None:
    """A subclass, as quantized and float8 layers are."""

    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * super().forward(x)

    for module in (layer.qkv, layer.r, layer.out):
        module.__class__ = Halved


WRAPPERS = {
    "an adapter": wrap,
    "a hook": hook,
    "a hook before": hook_before,
    "another forward": replace_forward,
    "a subclass": halve,
    "weight_norm": each(lambda m: parametrizations.weight_norm(m)),
    "spectral_norm": each(lambda m: parametrizations.spectral_norm(m)),
    "spectral_norm by a hook": each(lambda m: spectral_norm(m)),
    "prune": each(lambda m: prune.random_unstructured(m, "weight", 0.5)),
}


def stale(layer: RelAttention) -> None:
    """Changes parameters, so that whatever a hook or parametrization computed before is stale."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.fixture(params=WRAPPERS, ids=str)
def layer(request: pytest.FixtureRequest) -> RelAttention:
    it = RelAttention(WIDTH, 4)
    nn.init.normal_(it.content_bias)
    nn.init.normal_(it.position_bias)
    WRAPPERS[request.param](it)
    it.train()(torch.randn(B, L, WIDTH))  # spectral_norm's hook computes its weight in a forward
    stale(it)
    return it.eval()


def written_out(layer: RelAttention, x: Tensor) -> Tensor:
    """The layer's result by calls of its modules alone."""
    q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
    r = layer.r(layer.positions(x.size(1), 0)).unflatten(-1, (4, -1)).transpose(0, 1)
    out = rel_attention(q, k, v, r, layer.content_bias, layer.position_bias)
    result: Tensor = layer.out(out.transpose(1, 2).flatten(-2))
    return result


def test_the_memory_is_projected_as_the_segment(layer: RelAttention) -> None:
    x = torch.randn(B, M + L, WIDTH)
    expected = written_out(layer, x)[:, M:]
    torch.testing.assert_close(layer(x[:, M:], x[:, :M]), expected, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x[:, M:], x[:, :M]), expected, atol=1e-6, rtol=1e-5)
        cache = layer.new_cache(B, M, L)
        layer.fill_cache(cache, x[:, :M])
        torch.testing.assert_close(layer(x[:, M:], cache=cache), expected, atol=1e-6, rtol=1e-5)


def test_weights_and_projections_are_those_of_forward(layer: RelAttention) -> None:
    x = torch.randn(B, M + L, WIDTH)
    whole = layer.projections(x)
    apart = layer.projections(x[:, M:], x[:, :M])
    assert apart.k_mem is not None
    torch.testing.assert_close(torch.cat([apart.k_mem, apart.k], 2), whole.k)
    torch.testing.assert_close(layer.weights(x[:, M:], x[:, :M]), layer.weights(x)[:, :, M:])


def test_gradients_reach_what_wraps(layer: RelAttention) -> None:
    x = torch.randn(B, M + L, WIDTH)
    y = torch.randn(B, L, WIDTH)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    expected = torch.autograd.grad(written_out(layer, x)[:, M:], parameters, y)
    found = torch.autograd.grad(layer(x[:, M:], x[:, :M]), parameters, y)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4)


def test_a_module_is_called_once_in_a_forward() -> None:
    """FSDP and offload gather or load parameters around each call."""
    layer, calls = RelAttention(WIDTH, 4), []
    layer.qkv.register_forward_hook(lambda module, arguments, output: calls.append(arguments[0].shape))
    layer(torch.randn(B, L, WIDTH), torch.randn(B, M, WIDTH))
    assert calls == [(B, M + L, WIDTH)]


def test_a_plain_layer_projects_no_queries_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, calls = RelAttention(WIDTH, 4), []
    forward = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: (calls.append(tuple(a[1].shape)), forward(*a))[1])
    layer(torch.randn(B, L, WIDTH), torch.randn(B, M, WIDTH))
    assert sorted(calls) == [(WIDTH, WIDTH), (WIDTH, WIDTH), (2 * WIDTH, WIDTH), (3 * WIDTH, WIDTH)]


def test_what_is_plain() -> None:
    module = nn.Linear(4, 4)
    assert plain_weight(module) is module.weight
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert plain_weight(module) is None
    for change in (
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: setattr(m, "bias", nn.Parameter(torch.Tensor._make_subclass(Subclass, torch.zeros(4)))),
    ):
        module = nn.Linear(4, 4)
        change(module)
        assert plain_weight(module) is None
    x = torch.randn(2, 4)
    torch.testing.assert_close(project(module, x), module(x))


class Subclass(torch.Tensor):
    """A tensor whose products could be its own."""


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantization_finds_every_linear_layer() -> None:
    """torch.ao replaces modules that are exactly nn.Linear."""
    layer = RelAttention(WIDTH, 4).eval()
    quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    assert {type(getattr(quantized, name)).__module__ for name in ("qkv", "r", "out")} == {
        "torch.ao.nn.quantized.dynamic.modules.linear"
    }
    x = torch.randn(B, M + L, WIDTH)
    with torch.no_grad():
        exact, found = layer(x[:, M:], x[:, :M]), quantized(x[:, M:], x[:, :M])
        cache = quantized.new_cache(B, M, L)
        quantized.fill_cache(cache, x[:, :M])
        cached = quantized(x[:, M:], cache=cache)
    assert 0 < (found - exact).abs().max() < 0.05 * exact.abs().max() + 0.02
    assert (cached - exact).abs().max() < 0.05 * exact.abs().max() + 0.02


def test_positions_have_the_hidden_states_dtype() -> None:
    """A weight of integers says nothing of the encodings' dtype."""
    layer, seen = RelAttention(WIDTH, 4), []

    class Int8(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x @ (self.weight * self.scale).t()

    x = torch.randn(B, L, WIDTH)
    exact = layer(x)
    layer.r = Int8(layer.r)  # type: ignore[assignment]
    assert (layer(x) - exact).abs().max() < 0.02
    with torch.no_grad():
        assert (layer(x, cache=layer.new_cache(B, M, L)) - exact).abs().max() < 0.02
    assert set(seen) == {torch.float32}
    assert layer.positions(4, 2, like=x.double()).dtype == torch.float64


@pytest.mark.parametrize(
    "options", [{}, {"window": 4}, {"causal": False, "chunk": (4, 1)}, {"batch_first": False}], ids=str
)
def test_memory_that_no_query_sees_may_hold_anything(options: dict[str, Any]) -> None:
    """NaN in it reaches no gradient: not of a projection's weight either."""
    layer = RelAttention(WIDTH, 4, **options)
    x, memory = torch.randn(B, L, WIDTH), torch.randn(B, M, WIDTH)
    filled = torch.tensor([2, 0])
    start = start_from_lengths(filled + L, total=M + L)
    garbage = memory.masked_fill(torch.arange(M)[None, :, None] < (M - filled)[:, None, None], torch.nan)
    if options == {"window": 4}:  # which alone hides some
        start, garbage = None, memory.masked_fill(torch.arange(M)[None, :, None] < M - 3, torch.nan)

    def gradients(memory: Tensor) -> list[Tensor]:
        given = [x, memory] if layer.batch_first else [x.transpose(0, 1), memory.transpose(0, 1)]
        layer.zero_grad()
        layer(*given, start=start).square().sum().backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    for found, expected in zip(gradients(garbage), gradients(memory), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_cache_of_a_layer_that_is_gone_is_no_other_layers() -> None:
    x = torch.randn(1, 4, WIDTH)
    for _ in range(20):  # a new layer often stands where the old one was in memory
        first = RelAttention(WIDTH, 4).eval()
        gone = weakref.ref(first)
        cache = first.new_cache(1, 8, 4)
        with torch.no_grad():
            first(x, cache=cache)
            del first
            assert gone() is None
            other = RelAttention(WIDTH, 4).eval()
            with pytest.raises(ValueError, match="another layer's"):
                other(x, cache=cache)


def test_a_cache_of_a_compiled_layer() -> None:
    layer = RelAttention(WIDTH, 4).eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 4, WIDTH)
    with torch.no_grad():
        cache, other = layer.new_cache(1, 8, 4), layer.new_cache(1, 8, 4)
        torch.testing.assert_close(compiled(x, cache=cache), layer(x, cache=other))


def test_a_cache_of_an_offloaded_layer_asks_for_an_example() -> None:
    layer = RelAttention(WIDTH, 4).to("meta")
    layer.forward = lambda *a, **k: None  # type: ignore[method-assign]  # as accelerate's hook stands there
    with pytest.raises(ValueError, match="like must be given"):
        layer.new_cache(1, 8, 4)
    assert isinstance(RelAttention(WIDTH, 4).to("meta").new_cache(1, 8, 4), KeyValueCache)
