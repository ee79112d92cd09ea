"""State around a cache: parameters that change while it is in use, tools that trace a step into a
graph, and the `start` that static caches share."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from txl_kernels import KeyValueCache, RelAttention
from txl_kernels.torch_state import _exporting

STATIC = pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])


def start_of(batch: int = 1) -> Tensor:
    return torch.zeros(batch, 1, dtype=torch.int32)


def small_layer(**options: Any) -> RelAttention:
    layer = RelAttention(16, 2, **options).eval()
    nn.init.normal_(layer.content_bias)
    nn.init.normal_(layer.position_bias)
    return layer


def step(layer: RelAttention, x: Tensor, cache: KeyValueCache) -> Tensor:
    out = layer(x, cache=cache)
    if cache.start is not None:
        cache.start.sub_(x.size(1)).clamp_(min=0)
    return out


def in_place(layer: RelAttention) -> None:
    with torch.no_grad():
        layer.r.weight.mul_(2)


def by_optimizer(layer: RelAttention) -> None:
    with torch.enable_grad():
        layer(torch.randn(1, 4, 16)).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    layer.zero_grad()


def replaced(layer: RelAttention) -> None:
    layer.r.weight = nn.Parameter(layer.r.weight * 2)


def assigned(layer: RelAttention) -> None:
    layer.load_state_dict({name: x * 2 for name, x in layer.state_dict().items()}, assign=True)


def clamped(layer: RelAttention) -> None:
    layer.clamp_len = 1


def parametrized(layer: RelAttention) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    nn.utils.parametrize.register_parametrization(layer.r, "weight", Double())


@STATIC
@pytest.mark.parametrize("change", [in_place, by_optimizer, replaced, assigned, clamped, parametrized])
@torch.no_grad()
def test_a_cache_reads_the_table_of_the_present_parameters(change: Callable[[Any], None], static: bool) -> None:
    """Its keys and values remain: they are those that a new cache gets by the old projection."""
    layer = small_layer()
    old = copy.deepcopy(layer)
    cache = layer.new_cache(1, 6, 4, start=start_of() if static else None)
    x = torch.randn(1, 8, 16)
    step(layer, x[:, :4], cache)
    change(layer)
    new = layer.new_cache(1, 6, 4)
    k, v = old._split(old.qkv(x[:, :4])[..., 16:])
    new.append(k, v)
    torch.testing.assert_close(step(layer, x[:, 4:], cache), layer(x[:, 4:], cache=new))


@torch.no_grad()
def test_a_table_is_updated_in_any_mode_and_in_place() -> None:
    layer, x = small_layer(), torch.randn(1, 1, 16)
    for made, changed, used in ((True, False, False), (False, True, False), (False, False, True), (True, True, False)):
        with torch.inference_mode(made), torch.no_grad():
            cache = layer.new_cache(1, 6, 1)
        address = cache.r.data_ptr()
        with torch.inference_mode(changed), torch.no_grad():
            layer.r.weight.mul_(1.5)
        with torch.inference_mode(used), torch.no_grad():
            got = layer(x, cache=cache)
        torch.testing.assert_close(got, layer(x, cache=layer.new_cache(1, 6, 1)))
        assert cache.r.data_ptr() == address


@torch.no_grad()
def test_update_cache_after_a_change_without_a_version() -> None:
    layer, x = small_layer(), torch.randn(1, 2, 16)
    cache = layer.new_cache(1, 6, 2)
    layer.r.weight.data.mul_(2)
    layer.update_cache(cache)
    torch.testing.assert_close(layer(x, cache=cache), layer(x, cache=layer.new_cache(1, 6, 2)))


@torch.no_grad()
def test_a_table_of_the_users_own_is_not_written() -> None:
    layer, x = small_layer(), torch.randn(1, 4, 16)
    table = torch.randn(2, 9, 8)
    cache, before = KeyValueCache(table, 1, 4, 4), table.clone()
    layer(x, cache=cache)
    in_place(layer)
    layer.update_cache(cache)
    layer(x, cache=cache)
    assert torch.equal(table, before)


class Step(nn.Module):
    def __init__(self, static: bool) -> None:
        super().__init__()
        self.layer = small_layer(window=7).requires_grad_(False)
        self.cache = self.layer.new_cache(1, 6, 2, start=start_of() if static else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, cache=self.cache)


@STATIC
@pytest.mark.parametrize("trace", [
    lambda step, x: torch.export.export(step, (x,), strict=False),
    lambda step, x: torch.export.export(step, (x,), strict=True),
    lambda step, x: torch.jit.trace(step, (x,)),
    lambda step, x: make_fx(step)(x),
], ids=["export", "strict export", "jit.trace", "make_fx"])  # fmt: skip
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@torch.no_grad()
def test_a_step_is_not_traced_into_a_graph(trace: Callable[[Any, Tensor], Any], static: bool) -> None:
    """The graph would read and write the positions of the traced step for ever. torch.compile
    guards them."""
    if _exporting is not getattr(torch.compiler, "is_exporting", None):
        pytest.skip("torch 2.6 exports as torch.compile does")
    module, x = Step(static), torch.randn(1, 2, 16)
    with pytest.raises(
        Exception, match=r"cache must not be a (KeyValue|Static)Cache while a step is exported or traced"
    ):
        trace(module, x)


@STATIC
@torch.no_grad()
def test_a_compiled_step_reads_the_present_positions(static: bool) -> None:
    module = Step(static)
    eager, compiled = copy.deepcopy(module), torch.compile(module, backend="eager")
    for x in torch.randn(3, 1, 2, 16):
        torch.testing.assert_close(compiled(x), eager(x))
        for each in (module, eager):
            if static:
                each.cache.start.sub_(2).clamp_(min=0)


def test_a_start_belongs_to_caches_of_one_length() -> None:
    start = start_of()
    kept = small_layer().new_cache(1, 8, 2, start=start)
    with pytest.raises(ValueError, match=r"start must belong to caches of mem_len=4 alone, got .* mem_len=8"):
        small_layer().new_cache(1, 4, 2, start=start)
    del kept
    small_layer().new_cache(1, 4, 2, start=start)  # of caches that are gone


@torch.no_grad()
def test_a_start_in_use_is_not_reset_by_a_new_cache() -> None:
    start, layer, x = start_of(), small_layer(), torch.randn(1, 2, 16)
    cache = layer.new_cache(1, 4, 2, start=start)
    step(layer, x, cache)
    with pytest.raises(ValueError, match="start must belong to empty caches, got that of a cache to which 2 positions"):
        small_layer().new_cache(1, 4, 2, start=start)
    assert int(start) == 2
    cache.clear()
    small_layer().new_cache(1, 4, 2, start=start)


@torch.no_grad()
def test_a_start_that_is_not_lowered_is_an_error() -> None:
    """After fill_cache and after a step, as long as it could hide what was appended."""
    layer, x = small_layer(), torch.randn(1, 2, 16)
    cache = layer.new_cache(1, 4, 2, start=start_of())
    for append in (lambda: layer.fill_cache(cache, torch.randn(1, 3, 16)), lambda: layer(x, cache=cache)):
        cache.clear()
        append()
        with pytest.raises(RuntimeError, match="start must be lowered after each step, and after fill_cache"):
            layer(x, cache=cache)
    cache.start.sub_(2)
    for _ in range(2):
        step(layer, x, cache)
    layer(x, cache=cache)
    layer(x, cache=cache)  # full: lowering it would change nothing


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("inference", [False, True])
@STATIC
@torch.no_grad()
def test_copies_go_on_as_the_caches_themselves(static: bool, inference: bool, copied: Callable[[Any], Any]) -> None:
    """Two layers' caches, which share a start, copied together."""
    if inference and copied is not copy.deepcopy and static:
        pytest.skip("a start that is loaded in inference mode is an inference tensor")
    layers, start = [small_layer(), small_layer()], start_of() if static else None
    caches = [layer.new_cache(1, 6, 2, start=start) for layer in layers]

    def read(caches: list[KeyValueCache], x: Tensor) -> Tensor:
        for layer, cache in zip(layers, caches, strict=True):
            x = x + layer(x, cache=cache)
        if static:
            caches[0].start.sub_(2).clamp_(min=0)
        return x

    read(caches, torch.randn(1, 2, 16))
    with torch.inference_mode(inference):
        others = copied(caches)
    for x in torch.randn(3, 1, 2, 16):
        assert torch.equal(read(others, x), read(caches, x))
    for each in (others, caches):
        for cache in each:
            cache.reset(torch.tensor([True]))
            cache.clear()
    x = torch.randn(1, 2, 16)
    assert torch.equal(read(others, x), read(caches, x))


@torch.no_grad()
def test_captured_and_replayed_steps_are_counted() -> None:
    """A capture appends nothing, and a replay appends without Python."""
    layer, x = small_layer(), torch.randn(1, 2, 16)
    cache = layer.new_cache(1, 4, 2, start=start_of())
    step(layer, x, cache)
    state = cache.turn, cache.appended, cache.appends
    layer(x, cache=cache)
    cache.after_capture(2)
    assert (cache.turn, cache.appended, cache.appends) == state
    cache.after_replay(2)
    assert (cache.turn, cache.appended, cache.appends) == (0, 4, 2)
