"""Functions that adapters share: masks to intervals, encodings to a table, and the attention
itself."""

import math
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor

from txl_kernels.bounds import refused_with, scan
from txl_kernels.composed import merged
from txl_kernels.functional import rel_attention
from txl_kernels.integrations.streaming import cached
from txl_kernels.seed import new_seed
from txl_kernels.torch_state import exporting_to_onnx, is_plain

Bounds = tuple[Tensor | None, Tensor | None]
OTHER_KEYS = "a mask of another number of keys than the call"
Window = tuple[int | None, int | None] | None  # numbers of keys before and after a query's own, each None for all
ALL: Bounds = (None, None)
T = TypeVar("T")
_last = threading.local()
# In a trial (trial.py): the dropout probabilities of calls of the kernels, which drop nothing then.
dropouts: "ContextVar[list[float] | None]" = ContextVar("dropouts", default=None)


def mask_bounds(
    mask: Tensor | None, seen: Callable[[Tensor], Tensor] | None = None, kind: str = "mask"
) -> Bounds | None:
    """Return (start, end) of a mask, or None if it has holes (a hidden key between visible ones).
    Under torch.compile, assert that it has none.

    The result is kept for the other layers of a forward that share the mask.

    seen: converts the mask to bool [B, L, S] or [B, S], True where a query sees a key; None if it
    has this form. kind: another for each of several masks of a layer, the last of which is kept.
    """
    if mask is None:
        return ALL
    given = mask
    return memoized(kind, mask, seen, lambda: bounds_of(given if seen is None else seen(given)))


def bounds_or_reason(
    why: str | None, mask: Tensor | None, seen: Callable[[Tensor], Tensor] | None = None, *, keys: int | None,
    kind: str = "mask",
) -> Bounds | str:  # fmt: skip
    """Return the result of `mask_bounds`, or the reason why the original must answer a call: `why`,
    unless it is None, or what the mask has that no kernel computes.

    keys: the number of keys of the call, which the mask's last axis must have (originals broadcast
    a mask of one key); None to leave that to the caller. kind: of `mask_bounds`.
    """
    why = why or why_not_read(mask)
    if why is not None:
        return why
    if mask is not None and keys is not None and mask.size(-1) != keys:
        return OTHER_KEYS
    try:
        bounds = mask_bounds(mask, seen, kind)
    except AdditiveMask:
        return "an additive mask of other values than 0 and -inf"
    return "a mask with holes" if bounds is None else bounds


def bounds_of(seen: Tensor) -> Bounds | None:
    """Return the result of `mask_bounds` for a bool mask.

    In an exported graph, start is -1, which the operator refuses, if the mask has holes: ONNX drops
    assertions.
    """
    found = _scan(seen)
    return None if found is None else (refused_with(found[2], found[0]), found[1])


def _scan(seen: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the result of `scan`, or None if the mask has holes."""
    found = scan(seen, True)
    message = "the mask hides a key between visible ones; txl_kernels takes one interval a query"
    return found if exporting_to_onnx() or condition_met(found[2] < 0, message) else None


def blocked_bounds(seen: Tensor, before: int, length: int) -> Bounds | None:
    """Return the bounds of a mask in blocks of queries, or None if it has holes, as `mask_bounds`.

    seen: bool [B, blocks, size, keys], True where a query sees a key. The first key of a block is
    the one `before` keys before the block's first query, which may lie outside the sequence.
    length: the number of queries, and of keys; queries of the last block beyond it are dropped.
    """
    found = _scan(seen.flatten(1, 2))
    if found is None:
        return None
    at = torch.arange(length, dtype=torch.int32, device=seen.device)
    first = at - at % seen.size(2) - before
    start, end = ((x[:, :length] + first).clamp(0, length) for x in found[:2])
    return refused_with(found[2], start), end


def visible(mask: Tensor) -> Tensor:
    """Convert a mask [B, 1, L, S], bool (True where visible) or additive (0 where visible), to bool
    [B, L or 1, S].

    Raises:
        AdditiveMask: the mask has values other than 0 and -inf (or its dtype's lowest).
    """
    mask = mask[:, 0]
    if mask.dim() == 3 and mask.size(1) > 1 and mask.stride(1) == 0:
        mask = mask[:, :1]
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise AdditiveMask
    seen = mask == 0
    only_hides = (seen | (mask <= 0.9 * torch.finfo(mask.dtype).min)).all()
    if exporting_to_onnx():
        return refused_unless(only_hides, seen)
    if not condition_met(only_hides, "the mask adds other values than 0 and -inf, which no kernel adds"):
        raise AdditiveMask
    return seen


class AdditiveMask(ValueError):
    """The error of a mask that adds values other than 0 and -inf to scores."""


def project_table(project: nn.Module, encodings: Tensor, heads: int) -> Tensor:
    """Return the table r [H, T, D] or [B, H, T, D], farthest future first, of encodings [1 or B, T,
    d], farthest past first."""
    r: Tensor = project(encodings.flip(-2)).unflatten(-1, (heads, -1)).transpose(-3, -2)
    return r[0] if r.dim() == 4 and r.size(0) == 1 else r


def crop(window: Window, encodings: Tensor, past: int) -> tuple[Tensor, int]:
    """Cut encodings to the rows [.., T, d] of the distances that a window allows. Return them and
    the distance of the first.

    past: distance of the first row of `encodings`.
    """
    if window is None:
        return encodings, past
    left, right = window
    first = 0 if left is None else max(past - left, 0)
    last = encodings.size(-2) if right is None else past + right + 1
    return encodings[..., first:last, :], past - first


def intersect(own: tuple[int | None, int | None], window: Window) -> tuple[int | None, int | None]:
    """Return a module's own context (left, right), each None for no limit, limited by a window."""
    left, right = (
        x if y is None else y if x is None else min(x, y) for x, y in zip(own, window or (None, None), strict=True)
    )
    return left, right


def split_heads(x: Tensor, heads: int = -1, width: int = -1) -> Tensor:
    """Return x [B, L, H * D] as a view [B, H, L, D], by the number of heads or by their width."""
    view: Tensor = x.unflatten(-1, (heads, width)).transpose(1, 2)
    return view


def merge_heads(x: Tensor) -> Tensor:
    """Return x [B, H, L, D] as [B, L, H * D]."""
    return x.transpose(1, 2).flatten(-2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor | None, u: Tensor | None, w: Tensor | None, *bounds: Bounds,
    past: int | None = None, **settings: Any,
) -> Tensor:  # fmt: skip
    """Return `rel_attention` for k and v [B, Hkv, M + L, D] that include the M keys before the
    queries.

    It is bidirectional unless `settings` has another `causal`.

    q, r, u, w: as q, r, content_bias and position_bias of `rel_attention`.
    bounds: intervals (start, end) that queries see; disjoint if there are several.
    past: the distance of r's last row, if `settings` has no zero_row; None for S - 1, the greatest
    distance, with which most libraries' tables end.
    """
    if r is not None and "zero_row" not in settings:
        settings["zero_row"] = r.size(-2) - 1 - (k.size(2) - 1 if past is None else past)
    memory_len = k.size(2) - q.size(2)
    memory = None
    if memory_len > 0:
        memory = (k[:, :, :memory_len], v[:, :, :memory_len])
        k, v = k[:, :, memory_len:], v[:, :, memory_len:]
    if settings.get("dropout_p") and not torch.compiler.is_compiling() and (noted := dropouts.get()) is not None:
        noted.append(settings.pop("dropout_p"))
    if len(bounds) > 1 and settings.get("dropout_p"):
        settings["dropout_seed"] = new_seed(q.device)

    def over(interval: Bounds, **returned: Any) -> Any:
        start, end = (None if x is None else x.expand(q.size(0), q.size(2)) for x in interval)
        return rel_attention(
            q, k, v, r, u, w, memory, **{"causal": False, **settings}, start=start, end=end, **returned
        )

    out: Tensor
    if len(bounds) > 1:
        out, _ = merged([over(interval, return_lse=True) for interval in bounds])
    else:
        out = over(*bounds)
    return out


def attend_encodings(
    module: Any, q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, bounds: Bounds, project: nn.Module | None = None,
    u: Tensor | None = None, w: Tensor | None = None, zero_future: bool = False, **settings: Any,
) -> Tensor:  # fmt: skip
    """Return the attention [B, L, H * D] of an accelerated module, within its window, whose table
    is a projection of encodings [1 or B, 2 S - 1, d], farthest past first. While the module
    streams, the table is cached.

    project, u, w: the projection and the biases; the module's linear_pos, pos_bias_u and pos_bias_v
    if None. zero_future: True for a table that is 0 for keys after the query.
    """
    project = module.linear_pos if project is None else project
    window, heads = module.setting("window"), q.size(1)
    rows, past = crop(window, encodings, k.size(2) - 1)
    (r,) = cached(module, "r", (project,), rows, q.size(2), lambda: (project_table(project, rows, heads),))
    if zero_future:
        future = r.size(-2) - 1 - past
        r = torch.cat([torch.zeros_like(r[..., :future, :]), r[..., future:, :]], -2)
    u, w = module.pos_bias_u if u is None else u, module.pos_bias_v if w is None else w
    return merge_heads(attend(q, k, v, r, u, w, bounds, past=past, window=window, **settings))


def dropout_of(dropout: nn.Module) -> float:
    """Return the probability that a Dropout module applies now, which may be in another mode than
    the attention around it. NaN if the module is of another class, whose probability is unknown."""
    if type(dropout) is nn.Dropout:
        return float(dropout.p) if dropout.training else 0.0
    return 0.0 if type(dropout) is nn.Identity else math.nan


def is_zero(mask: Tensor) -> Tensor:
    """Return where a mask is zero, as bool: the visible keys."""
    return ~mask.bool()


def first_if_same(x: Tensor, axis: int = 0) -> Tensor | None:
    """Return the first slice along an axis, whose size stays 1, or None if another slice has other
    values. Under torch.compile, return it, with an assertion in the graph.

    The comparison is kept for other layers that share the tensor. Synchronizes with the device.
    """
    first = x.narrow(axis, 0, 1)
    if x.size(axis) == 1 or x.stride(axis) == 0:
        return first

    def compare() -> bool:
        return condition_met(same(), "encodings differ between batch rows, for which a compiled call has no table")

    def same() -> Tensor:
        return (x == first).all()

    if exporting_to_onnx():
        return refused_unless(same(), first)
    return first if memoized("encodings", x, axis, compare) else None


# Conditions on tensors' values: read once for all layers of a forward that share a tensor.


def condition_met(condition: Tensor, message: str) -> bool:
    """Whether a condition, bool [], is met. Under torch.compile, True, with an assertion that runs
    with the graph. True for a fake tensor, and False where it may not be known: under
    torch.func.vmap, where it may differ between the elements, and under torch.onnx.export, which
    writes no assertions."""
    if exporting_to_onnx():
        return False
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
        return True
    return is_true(condition, True)


def refused_unless(condition: Tensor, x: Tensor) -> Tensor:
    """Return x, in a graph that ONNX runtimes refuse to run where a condition, bool [], is not met:
    its index is out of range then."""
    rows = torch.arange(x.size(0), device=x.device)
    return x.index_select(0, torch.where(condition, rows, x.size(0)))


def why_not_read(x: Tensor | None) -> str | None:
    """Return the reason why a mask cannot be read, or None: torch.func.vmap maps over it."""
    if torch.compiler.is_compiling():
        return None
    while x is not None and functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return "a mask that torch.func.vmap maps over"
        x = functorch.get_unwrapped(x)
    return None


def is_true(condition: Tensor, fake: bool) -> bool:
    """Whether a condition, bool [], is met; `fake` for a fake tensor, which has no value, and False
    under torch.func.vmap if it belongs to one of the elements."""
    if isinstance(condition, FakeTensor):
        return fake
    try:
        return bool(condition)
    except RuntimeError:
        if is_plain():
            raise
        return False


def memoized(kind: str, x: Tensor, key: Any, compute: Callable[[], T]) -> T:
    """Return compute(), or its last result in this thread if tensor and key are the same.

    A tensor that was changed in place counts as another one. Changes that do not increase its
    version are not noticed: those through `.data` or through shared memory. Inference tensors have
    no version, so for them compute() runs each time, as it does under transforms and tracers.
    """
    if not is_plain() or x.is_inference():
        return compute()
    last = _last.__dict__.get(kind)
    if last is not None and last[0]() is x and last[1] == x._version and last[2] == key:
        result: T = last[3]
        return result
    with torch.inference_mode(False):  # the result may be used in training
        result = compute()
    _last.__dict__[kind] = (weakref.ref(x), x._version, key, result)
    return result
