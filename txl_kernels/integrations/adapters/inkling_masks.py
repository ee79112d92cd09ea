"""Masks and distances of Inkling's text models in transformers, without tensors of all pairs: the
functions that make them, replaced by functions that return intervals and numbers of keys."""

import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from txl_kernels.integrations.attention import bounds_of, is_true


class CachedKeys(NamedTuple):
    """The keys that a layer's cache returns for a call.

    Attributes:
        past: the number of keys before the first query.
        total: the number of keys. It is past + L, or more if the cache returns its unused room.
        first: the position of the first key in the sequence, which a sliding cache shifts.
    """

    past: int
    total: int
    first: int


class CausalMask(NamedTuple):
    """The mask of a causal layer, but for a sliding layer's window: a query sees no key after its
    own, and of the others those from `start` to `end`, int32 [1 or B, 1 or L] or None."""

    start: Tensor | None
    end: Tensor | None
    keys: CachedKeys


def keys_of(cache: Any, layer: int, length: int) -> CachedKeys | None:
    """Return the keys that a layer's cache will return for `length` more; None if only the
    device knows it, in a compiled call, or no tensor holds it (a fake tensor)."""
    if cache is None:
        return CachedKeys(0, length, 0)
    total, first = cache.get_mask_sizes(length, layer)
    offset = cache.get_query_offset(layer)  # a tensor for a static cache
    if isinstance(offset, Tensor) and (torch.compiler.is_compiling() or isinstance(offset, FakeTensor)):
        return None
    return CachedKeys(int(offset) - first, total, first)


def _causal_mask(config: Any, x: Tensor, mask: Any, cache: Any, position_ids: Any, layer: int) -> CausalMask | None:
    """Return what the queries of x [B, L, d] see in layers of a kind; None if that is no interval
    of keys up to a query's own.

    mask: None, or the attention mask of the model's caller, [B, S]. layer: the number of a layer of
    this kind.
    """
    length = x.size(1)
    keys = keys_of(cache, layer, length)
    if not getattr(config, "is_causal", True) or keys is None or not 0 <= keys.past <= keys.total - length:
        return None
    if mask is None:
        packed = cache is None and position_ids is not None
        return CausalMask(_packed_starts(position_ids) if packed else None, None, keys)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or (cache is None and mask.size(1) != length):
        return None
    last = keys.first + keys.total
    padding = F.pad(mask.to(x.device, torch.bool), (-keys.first, last - mask.size(1)))
    bounds = bounds_of(padding)
    if bounds is None:
        return None
    start, end = bounds
    assert start is not None
    assert end is not None
    hidden = ((start > 0) | (end < keys.past + length)).any()
    if not torch.compiler.is_compiling() and is_true(~hidden, False):
        return CausalMask(None, None, keys)
    visible = keys.past + length  # of a static cache's unused room no query sees anything
    return CausalMask(start.clamp(max=visible), end.clamp(max=visible), keys)


def _packed_starts(position_ids: Any) -> Tensor | None:
    """Return the index of the first token of each token's sequence, int32 [1 or B, L], where
    position_ids restart within a row; None if they do not."""
    restarts = F.pad(position_ids.diff(dim=-1) != 1, (1, 0))
    if not torch.compiler.is_compiling() and is_true(~restarts.any(), False):
        return None
    at = torch.arange(restarts.size(1), device=restarts.device, dtype=torch.int32)
    return torch.where(restarts, at, 0).cummax(-1).values.to(torch.int32)


def forward_with_intervals(original: type) -> Callable[..., Any]:
    """Return a copy of the `forward` of a text model's class, which passes `CausalMask` and
    `CachedKeys` to its layers in place of masks and distances, where they are such."""
    forward: Any = original.forward  # type: ignore[attr-defined]
    scope = inspect.unwrap(forward).__globals__
    masks = importlib.import_module("transformers.masking_utils")
    first_full = getattr(masks, "find_first_full_attention_index", _first_full)  # since 5.24

    def layer_of(cache: Any, sliding: bool) -> int:
        """Return the layer that stands for all of its kind, as the originals choose it."""
        if not sliding:
            return int(first_full(cache))
        return cache.is_sliding.index(True) if cache is not None and True in cache.is_sliding else 0

    def mask_maker(name: str, sliding: bool) -> Callable[..., Any]:
        def make(
            config: Any, inputs_embeds: Tensor, attention_mask: Any, cache: Any = None, position_ids: Any = None,
            past_key_values: Any = None,
        ) -> Any:  # fmt: skip
            cache = past_key_values if cache is None else cache
            seen = _causal_mask(config, inputs_embeds, attention_mask, cache, position_ids, layer_of(cache, sliding))
            return scope[name](config, inputs_embeds, attention_mask, cache, position_ids) if seen is None else seen

        return make

    def distances(inputs_embeds: Tensor, cache: Any, is_sliding: bool) -> Any:
        keys = keys_of(cache, layer_of(cache, is_sliding), inputs_embeds.size(1))
        return scope["get_relative_distance"](inputs_embeds, cache, is_sliding) if keys is None else keys

    return with_globals(
        forward,
        {
            "create_causal_mask": mask_maker("create_causal_mask", False),
            "create_sliding_window_causal_mask": mask_maker("create_sliding_window_causal_mask", True),
            "get_relative_distance": distances,
        },
    )


def _first_full(cache: Any) -> int:
    """Return the first layer that is not sliding, or 0."""
    sliding = [] if cache is None else cache.is_sliding
    return sliding.index(False) if False in sliding else 0


def with_globals(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function, with the decorators around it, whose code finds the values of
    `names` under these global names. The function itself, and its module, do not change.

    Decorators are those of functools.wraps, which hold what they wrap in a cell of their closure.
    The copy sees later changes of its module's globals no more.
    """
    code = function.__code__
    inner = getattr(function, "__wrapped__", None)
    scope, closure = function.__globals__, function.__closure__
    if inner is None:
        # By the name of its module, torch.compile would look for the globals in the module.
        scope = {name: value for name, value in scope.items() if name != "__name__"} | dict(names)
    else:
        copied = with_globals(inner, names)
        closure = tuple(types.CellType(copied) if cell.cell_contents is inner else cell for cell in closure or ())
    result = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = function.__kwdefaults__
    result.__module__ = function.__module__
    return result


# What an original layer expects, for a call that it must answer.


def mask_of(seen: CausalMask, length: int, window: int | None, x: Tensor, additive: bool) -> Tensor:
    """Return the mask [1 or B, 1, L, S] that the original makes: bool, or 0 and the lowest number
    of x's dtype."""
    queries = torch.arange(length, device=x.device).unsqueeze(-1) + seen.keys.past
    keys = torch.arange(seen.keys.total, device=x.device)
    shown = (keys <= queries).unsqueeze(0)
    if window is not None:
        shown = shown & (keys > queries - window)
    if seen.start is not None:
        shown = shown & (keys >= seen.start.to(x.device).unsqueeze(-1))
    if seen.end is not None:
        shown = shown & (keys < seen.end.to(x.device).unsqueeze(-1))
    shown = shown.unsqueeze(1)
    if not additive:
        return shown
    return torch.where(shown, torch.zeros((), dtype=x.dtype, device=x.device), torch.finfo(x.dtype).min)


def distances_of(keys: CachedKeys, length: int, device: torch.device) -> Tensor:
    """Return the distance of each query to each key, int64 [L, S]."""
    queries = torch.arange(length, device=device) + keys.past
    return queries.unsqueeze(-1) - torch.arange(keys.total, device=device)
