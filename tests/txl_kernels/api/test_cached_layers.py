"""Whose a cache is, what a failed call leaves in it, and chunks that are not whole."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from txl_kernels import KeyValueCache, LearnedRelativeAttention, RelAttention
from txl_kernels.cache import unchanged_on_error

WIDTH = 12
LAYERS: dict[str, Callable[..., Any]] = {
    "sinusoids": RelAttention,
    "a learned table": lambda *sizes, **options: LearnedRelativeAttention(*sizes, extent=5, qk_norm=True, **options),
}


def layer(name: str = "sinusoids", **options: Any) -> Any:
    it = LAYERS[name](WIDTH, 3, dtype=torch.float64, **options).eval()
    for p in it.parameters():
        nn.init.normal_(p, 0, 0.3)
    return it


def stream(length: int) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=torch.float64)


def new_cache(it: Any, mem_len: int, max_segment: int, static: bool) -> KeyValueCache:
    start = torch.full((2, 1), mem_len, dtype=torch.int32) if static else None
    made: KeyValueCache = it.new_cache(2, mem_len, max_segment, start=start)
    return made


def saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "save": saved,
}  # fmt: skip


@pytest.mark.parametrize("static", [False, True], ids=["a cache that grows", "a static cache"])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_copied_cache_belongs_to_the_parameters_that_filled_it(
    name: str, copied: Callable[[Any], Any], static: bool
) -> None:
    own, other, x = layer(name, window=6), layer(name, window=6), stream(8)
    cache = new_cache(own, 5, 4, static)
    own(x[:, :4], cache=cache)
    if static:
        cache.start.sub_(4)  # type: ignore[union-attr]
    want = own(x)[:, 4:]
    with pytest.raises(
        ValueError, match="cache must be this layer's own, got a copy of the cache of a layer with other"
    ):
        other(x[:, 4:], cache=copied(cache))
    loaded = layer(name, window=6)
    loaded.load_state_dict(own.state_dict())
    for it in (own, loaded):
        alone = copied(copied(cache))
        torch.testing.assert_close(it(x[:, 4:], cache=alone), want)
    if copied is not copy.copy:
        with_its_layer, its_cache = copied((own, cache))
        torch.testing.assert_close(with_its_layer(x[:, 4:], cache=its_cache), want)
        with pytest.raises(ValueError, match="got another layer's"):
            own(x[:, 4:], cache=its_cache)


@torch.no_grad()
def test_a_copied_cache_of_a_layer_that_is_gone_or_changed() -> None:
    it, x = layer(window=6), stream(4)
    cache = it.new_cache(2, 5, 4)
    twin = copy.deepcopy(it)
    before = copy.deepcopy(cache)
    it.qkv.weight[0, 0] += 1e-9
    with pytest.raises(ValueError, match="a copy of the cache of a layer with other parameters"):
        it(x, cache=before)
    twin.clamp_len = 3  # W_kR R in the cache is of other distances
    with pytest.raises(ValueError, match="a copy of the cache of a layer with other parameters"):
        twin(x, cache=copy.deepcopy(before))
    del it
    orphan = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="a copy of the cache of a layer with other parameters"):
        twin(x, cache=orphan)


@torch.no_grad()
def test_a_copied_cache_of_an_offloaded_layer_is_refused() -> None:
    """Its parameters cannot be read, so that nothing tells whose keys the copy holds."""
    it, x = layer(window=6), stream(4)
    cache, twin = it.new_cache(2, 5, 4), copy.deepcopy(it)
    it.to("meta")
    with pytest.raises(ValueError, match="parameters that could not be read"):
        twin(x, cache=copy.deepcopy(cache))


def fails(*_: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("static", [False, True], ids=["a cache that grows", "a static cache"])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_failed_call_leaves_the_cache_as_it_was(name: str, static: bool) -> None:
    it, x = layer(name, window=6), stream(12)
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
    with unchanged_on_error([cache]):
        for call in calls:
            call()
        raise KeyboardInterrupt


@torch.no_grad()
def test_appends_are_taken_back() -> None:
    """At any fill level, over moves to the buffers' front and resets of rows."""
    cache, twin = (KeyValueCache(None, 2, 5, 4, n_kv_head=1, d_key=3, dtype=torch.float64) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for n in range(60):
        k = torch.randn(2, 1, 1 + n % 4, 3, dtype=torch.float64, generator=generator)
        with pytest.raises(KeyboardInterrupt):
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
def test_a_cache_that_cannot_be_restored_is_refused_until_it_is_cleared() -> None:
    it, x = layer(window=6), stream(4)
    cache = it.new_cache(2, 5, 4)
    with pytest.raises(KeyboardInterrupt):
        interrupted(cache, lambda: it(x, cache=cache), lambda: it(x, cache=cache))
    for use in (lambda: it(x, cache=cache), lambda: cache.append(x, x), lambda: cache.memory):
        with pytest.raises(RuntimeError, match=r"cache is not whole, because an error interrupted .*: clear\(\) it"):
            use()
    cache.clear()
    torch.testing.assert_close(it(x, cache=cache), it(x))


@pytest.mark.parametrize("static", [False, True], ids=["a cache that grows", "a static cache"])
@torch.no_grad()
def test_no_segment_begins_inside_a_chunk(static: bool) -> None:
    it, x = layer(causal=False, chunk=(4, 2)), stream(15)
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@torch.no_grad()
def test_a_nested_tensor_is_told_about_packed_sequences() -> None:
    parts = [torch.randn(n, WIDTH, dtype=torch.float64) for n in (3, 5)]
    for causal in (True, False):
        it = layer(causal=causal)
        for layout in (torch.jagged, torch.strided):
            nested = torch.nested.nested_tensor(parts, layout=layout)
            with pytest.raises(
                TypeError, match=r"x must be a dense tensor, got a nested tensor: pass x\.values\(\)\[None\] with"
            ):
                it(nested)
            with pytest.raises(TypeError, match="memory must be a dense tensor, got a nested tensor"):
                it(stream(3), nested)
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
        found = it(jagged.values()[None], cu_seqlens=jagged.offsets())[0]
        torch.testing.assert_close(found, torch.cat([it(part[None])[0] for part in parts]))
