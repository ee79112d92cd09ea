"""Layers that are wrapped, copied, compiled, or whose projections are wrapped, hooked,
reparametrized or quantized: a change of a module acts on segment and memory alike, in every
method."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from txl_kernels import KeyValueCache, RelAttention, rel_attention, start_from_lengths
from txl_kernels.linear import plain_weight, project

pytestmark = pytest.mark.usefixtures("one_process")  # which DDP and FSDP need
B, M, L, WIDTH = 2, 6, 8, 32
NAMES = ("qkv", "r", "out")
Change = Callable[[nn.Module], Any]


class Halved(nn.Linear):
    """A subclass, as quantized and float8 layers are."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Int8(nn.Module):
    """A linear layer with a weight of integers, which says nothing of the dtype of its input."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return x @ (self.weight * self.scale).t()


def each(change: Change) -> Change:
    """Apply a change in place to each projection of a layer."""

    def changed(layer: nn.Module) -> None:
        for name in NAMES:
            change(getattr(layer, name))

    return changed


def replace_each(wrap: Change) -> Change:
    def replaced(layer: nn.Module) -> None:
        for name in NAMES:
            setattr(layer, name, wrap(getattr(layer, name)))

    return replaced


def replace_forward(module: nn.Module) -> None:
    """Replace the method in the instance, as accelerate's hooks do."""
    module.forward = lambda x, forward=module.forward: -forward(x)  # type: ignore[method-assign]


def shard(layer: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of torch 2.6 needs a GPU")
    mesh = init_device_mesh("cpu", (1,))
    for module in (*(getattr(layer, name) for name in NAMES), layer):
        fully_shard(module, mesh=mesh)


def quantize(layer: nn.Module) -> nn.Module:
    """Let torch.ao replace modules that are exactly nn.Linear."""
    quantized: nn.Module = torch.ao.quantization.quantize_dynamic(layer.eval(), {nn.Linear})
    assert all(type(getattr(quantized, name)).__module__.startswith("torch.ao.nn.quantized") for name in NAMES)
    return quantized


# Each changes a layer in place, or returns a module around it.
WRAPPERS: dict[str, Change] = {
    "forward hook": each(lambda m: m.register_forward_hook(lambda module, arguments, output: 2 * output)),
    "forward pre-hook": each(lambda m: m.register_forward_pre_hook(lambda module, arguments: (3 * arguments[0],))),
    "replaced forward": each(replace_forward),
    "subclass": each(lambda m: setattr(m, "__class__", Halved)),
    "weight_norm": each(parametrizations.weight_norm),
    "spectral_norm": each(parametrizations.spectral_norm),
    "spectral_norm by a hook": each(spectral_norm),
    "prune": each(lambda m: prune.random_unstructured(m, "weight", 0.5)),
    "int8 weights": replace_each(Int8),
    "dynamic quantization": quantize,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.compile": lambda layer: torch.compile(layer, backend="aot_eager"),
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP": shard,
}


def new_layer() -> RelAttention:
    layer = RelAttention(WIDTH, 4)
    nn.init.normal_(layer.content_bias)
    nn.init.normal_(layer.position_bias)
    return layer


def by_modules(layer: Any, x: Tensor) -> Tensor:
    """The layer's result by calls of its modules."""
    q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
    r = layer.r(layer.positions(x.size(1), 0, like=x)).unflatten(-1, (4, -1)).transpose(0, 1)
    out = rel_attention(q, k, v, r, layer.content_bias, layer.position_bias)
    result: Tensor = layer.out(out.transpose(1, 2).flatten(-2))
    return result


def unsharded(layer: Any) -> Any:
    """The layer, or one with the whole parameters of an FSDP layer."""
    if not any(hasattr(p, "full_tensor") for p in layer.parameters()):
        return layer
    twin = new_layer()
    twin.load_state_dict({name: x.full_tensor() for name, x in layer.state_dict().items()})
    return twin


def gradients_of(layer: nn.Module, out: Tensor, weight: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    (out * weight).sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {name: getattr(x, "full_tensor", x.clone)() for name, x in found.items()}


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:TypedStorage", "ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_layer(name: str) -> None:
    """Values with a memory and with a cache, weights and gradients are those of calls of the
    layer's modules."""
    torch.compiler.reset()
    layer, x, weight = new_layer(), torch.randn(B, M + L, WIDTH), torch.randn(B, L, WIDTH)
    made = WRAPPERS[name](layer)
    wrapped = layer if made is None else made
    inner = getattr(wrapped, "module", getattr(wrapped, "_orig_mod", wrapped))
    wrapped.train()(torch.randn(B, L, WIDTH))  # spectral_norm's hook computes its weight in a forward
    with torch.no_grad():  # what a hook or parametrization computed before is stale
        for parameter in wrapped.parameters():
            parameter.add_(0.1 * parameter.sin())
    wrapped.eval()
    plain, tolerance = unsharded(inner), {"rtol": 1e-5, "atol": 1e-6}
    if name == "dynamic quantization":  # the scale of activations is that of a call
        tolerance = {"rtol": 0.05, "atol": 0.02}
    found, expected = wrapped(x[:, M:], x[:, :M]), by_modules(plain, x)[:, M:]
    torch.testing.assert_close(found, expected, **tolerance)
    if name != "dynamic quantization":  # which has no gradients
        gradients = gradients_of(inner, found, weight)
        assert len(gradients) == len([p for p in plain.parameters() if p.requires_grad])
        torch.testing.assert_close(gradients, gradients_of(plain, expected, weight), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x[:, M:], x[:, :M]), expected, **tolerance)
        cache = plain.new_cache(B, M, L, like=x)
        plain.fill_cache(cache, x[:, :M])
        cache.owner = None
        torch.testing.assert_close(wrapped(x[:, M:], cache=cache), expected, **tolerance)
        torch.testing.assert_close(plain.weights(x[:, M:], x[:, :M]), plain.weights(x)[:, :, M:], **tolerance)


def test_projections_are_called_once_in_a_forward() -> None:
    """FSDP and offload gather or load parameters around each call."""
    layer, calls = RelAttention(WIDTH, 4), []
    layer.qkv.register_forward_hook(lambda module, arguments, output: calls.append(arguments[0].shape))
    layer(torch.randn(B, L, WIDTH), torch.randn(B, M, WIDTH))
    assert calls == [(B, M + L, WIDTH)]


def test_plain_layer_projects_no_queries_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, calls = RelAttention(WIDTH, 4), []
    forward = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: (calls.append(tuple(a[1].shape)), forward(*a))[1])
    layer(torch.randn(B, L, WIDTH), torch.randn(B, M, WIDTH))
    assert sorted(calls) == [(WIDTH, WIDTH), (WIDTH, WIDTH), (2 * WIDTH, WIDTH), (3 * WIDTH, WIDTH)]


class Subclass(torch.Tensor):
    """A tensor whose products could be its own."""


def test_plain_weight() -> None:
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


@pytest.mark.parametrize(
    "options", [{}, {"window": 4}, {"causal": False, "chunk": (4, 1)}, {"batch_first": False}], ids=str
)
def test_nan_in_unseen_memory_reaches_no_gradient(options: dict[str, Any]) -> None:
    """Not even that of a projection's weight."""
    layer = RelAttention(WIDTH, 4, **options)
    x, memory = torch.randn(B, L, WIDTH), torch.randn(B, M, WIDTH)
    filled = torch.tensor([2, 0])
    start = start_from_lengths(filled + L, total=M + L)
    garbage = memory.masked_fill(torch.arange(M)[None, :, None] < (M - filled)[:, None, None], torch.nan)
    if options == {"window": 4}:  # which alone hides some
        start, garbage = None, memory.masked_fill(torch.arange(M)[None, :, None] < M - 3, torch.nan)

    def gradients(memory: Tensor) -> dict[str, Tensor]:
        given = [x, memory] if layer.batch_first else [x.transpose(0, 1), memory.transpose(0, 1)]
        return gradients_of(layer, layer(*given, start=start), torch.ones(()))

    torch.testing.assert_close(gradients(garbage), gradients(memory))


def test_cache_of_an_offloaded_layer_needs_an_example() -> None:
    layer = RelAttention(WIDTH, 4).to("meta")
    layer.forward = lambda *a, **k: None  # type: ignore[method-assign]  # as accelerate's hook replaces it
    with pytest.raises(ValueError, match="like must be given"):
        layer.new_cache(1, 8, 4)
    assert isinstance(RelAttention(WIDTH, 4).to("meta").new_cache(1, 8, 4), KeyValueCache)
