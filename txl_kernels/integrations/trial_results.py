"""The results of a trial's calls (trial.py): outputs, gradients, what dropout is applied to, and
what a module keeps; and how those of an adapter and of an original differ."""

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from txl_kernels.integrations.attention import dropouts
from txl_kernels.integrations.conditions import words
from txl_kernels.integrations.peer import RandomInputs
from txl_kernels.integrations.trial_calls import Pass

TOLERANCE = 2e-4  # relative to the largest value of a tensor; another formula differs by much more
ROUNDING = 2e-6  # of gradients, relative to the largest of all: one may be zero but for rounding
_DRAWS = words("""
    rand randn randint randperm bernoulli multinomial normal poisson rand_like randn_like randint_like bernoulli_ uniform_
    normal_ random_ exponential_ geometric_ cauchy_ log_normal_ rrelu
""")
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def difference(theirs: "Result", ours: "Result", case: Pass) -> str | None:
    """Return how outputs or gradients differ, or None."""
    valid, tolerance = case.valid, TOLERANCE * case.scale**2  # scores, whose rounding counts, are greater
    if len(theirs.outputs) != len(ours.outputs):
        return f"its result has {len(theirs.outputs)} parts, where the adapter's has {len(ours.outputs)}"
    for number, (wanted, found) in enumerate(zip(theirs.outputs, ours.outputs, strict=True)):
        name = "the output" if number == 0 else f"part {number} of the result"
        if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
            if wanted is not found and not (found is None and are_weights(wanted)):
                return f"{name} is a {type(wanted).__name__}, the adapter's a {type(found).__name__}"
            continue
        if number == 0 and valid is not None and wanted.shape[:2] == valid.shape == found.shape[:2]:
            wanted, found = wanted[valid], found[valid]
        if not _same(found, wanted, tolerance=tolerance):
            return _off(name, found, wanted)
    if not theirs.gradients:
        return None
    largest = max(_norm(g) for g in theirs.gradients.values())
    zero = torch.zeros((), device="cpu")
    for name in {**theirs.gradients, **ours.gradients}:
        wanted, found = (x.gradients.get(name, zero) for x in (theirs, ours))
        wanted, found = torch.broadcast_tensors(wanted, found)
        if not _same(found, wanted, ROUNDING * largest):
            return _off(f"the gradient of {name}", found, wanted)
    return None


def _same(found: Tensor, wanted: Tensor, least: float = 1e-5, tolerance: float = TOLERANCE) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return _norm(found - wanted) <= tolerance * _norm(wanted) + least


def _norm(x: Tensor) -> float:
    """Return the largest absolute value; not a number if there is one that is not."""
    return float(torch.linalg.vector_norm(x, math.inf)) if x.numel() else 0.0


def _off(name: str, found: Tensor, wanted: Tensor) -> str:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{name} has shape {list(wanted.shape)} and {wanted.dtype}, the adapter's {list(found.shape)}, {found.dtype}"
    return f"{name} is off by {_norm(found - wanted):.2g}, of at most {_norm(wanted):.2g}"


def are_weights(x: Any) -> bool:
    """Whether a tensor holds attention weights: none is negative, and no row's sum exceeds 1."""
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
        return False
    x = x[~x.isnan().any(-1)]  # rows of queries that see no key
    return x.numel() > 0 and bool((x >= 0).all()) and bool((x.sum(-1) < 1.001).all())


class Result:
    """The results of a call: outputs, gradients by name, and what dropout was applied to."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.gradients: dict[str, Tensor] = {}
        self.dropped: list[tuple[float, Tensor | None]] = []


def run(module: Any, x: Tensor, call: Any, others: Sequence[Tensor], case: Pass) -> Result:
    result = Result()
    with torch.set_grad_enabled(case.gradients):
        x = (case.scale * x.detach()).requires_grad_(case.gradients)
        try:
            outputs = list(_leaves(_called(module, x, call, result)))
        except NotImplementedError:  # FlexAttention has no gradients on a CPU
            with torch.no_grad():
                outputs = list(_leaves(_called(module, x.detach(), call, result)))
        made = [y for n, y in enumerate(outputs) if isinstance(y, Tensor) and (n == 0 or not are_weights(y))]
        weights = [RandomInputs(0).normal(*y.shape) for y in made if y.requires_grad]
        made = [y for y in made if y.requires_grad]
        if made and case.valid is not None and made[0] is outputs[0] and made[0].shape[:2] == case.valid.shape:
            weights[0] = weights[0] * case.valid.view(*case.valid.shape, *[1] * (made[0].dim() - 2))
        if made:
            total = torch.stack([(y * weight).sum() for y, weight in zip(made, weights, strict=True)]).sum()
            named = {"its input": x, **dict(module.named_parameters())}
            named |= {f"argument {n} of shape {list(y.shape)}": y for n, y in enumerate(others)}
            found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
            result.gradients = {name: g for name, g in zip(named, found, strict=True) if g is not None}
    result.outputs = [y.detach() if isinstance(y, Tensor) else y for y in outputs]
    return result


def _called(module: Any, x: Tensor, call: Any, result: Result) -> Any:
    result.dropped = []
    token = dropouts.set([])
    try:
        with _WithoutDropout(result.dropped):
            found = call(module, x)
        result.dropped += [(p, None) for p in dropouts.get() or []]
        return found
    finally:
        dropouts.reset(token)


def _leaves(result: Any) -> Iterator[Any]:
    """Yield the tensors of nested tuples, and what else they hold."""
    if isinstance(result, (tuple, list)):
        for part in result:
            yield from _leaves(part)
    else:
        yield result


class _WithoutDropout(TorchFunctionMode):
    """A mode, of this thread alone, in which nothing is dropped. It notes each probability that is
    not zero, with the tensor; None for attention weights of a fused function. Other random
    functions raise an error."""

    def __init__(self, dropped: list[tuple[float, Tensor | None]]) -> None:
        super().__init__()
        self._dropped = dropped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DRAWS:
            raise RuntimeError(f"it draws random numbers, by torch's {name}")
        if name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
            names = _SDPA if name[0] == "s" else inspect.signature(func).parameters
            given = dict(zip(names, args, strict=False)) | kwargs
            p = float(given.pop("dropout_p", 0.0))
            if p > 0 and given.get("training", True):
                self._dropped.append((p, None))
            args, kwargs = (), given | {"dropout_p": 0.0}
        elif "dropout" in name:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            if name not in ("dropout", "dropout_"):
                raise RuntimeError(f"it drops by torch's {name}")
            x, p = given["input"], float(given.get("p", 0.5))
            if given.get("training", given.get("train", True)) and p > 0:
                self._dropped.append((p, x.detach()))
            return x
        return func(*args, **kwargs)


def different_dropout(theirs: Result, ours: Result) -> str | None:
    """Return how dropout differs, or None: both drop attention weights with equal probabilities,
    and the same other tensors. The adapter's weights are in the kernels; the original's may be."""
    of_weights = {round(p, 6) for p, x in theirs.dropped if x is None or are_weights(x)}
    in_kernels = {round(p, 6) for p, x in ours.dropped if x is None}
    if of_weights != in_kernels:
        names = [", ".join(map(str, sorted(x))) or "none" for x in (of_weights, in_kernels)]
        return f"its dropout of attention weights is {names[0]}, the adapter's {names[1]}"
    left = [(p, x) for p, x in theirs.dropped if x is not None and not are_weights(x)]
    others = [(p, x) for p, x in ours.dropped if x is not None]
    if len(left) != len(others):
        return "it applies dropout to another tensor than its attention weights"
    for (p, x), (q, y) in zip(left, others, strict=True):
        if not math.isclose(p, q) or not _same(y, x):
            return "it applies dropout to other tensors than the adapter"
    return None


def different_state(slow: nn.Module, fast: nn.Module) -> str | None:
    """Return what a module keeps from a call, and the adapter does not, or None; the adapter may
    leave out attention weights."""
    for (name, theirs), ours in zip(slow.named_modules(), fast.modules(), strict=True):
        held = {**vars(theirs), **theirs._buffers}
        for key, value in held.items():
            other = {**vars(ours), **ours._buffers}.get(key)
            plain = value is None or isinstance(value, (bool, int, float, str))
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                same = isinstance(other, Tensor) and value.shape == other.shape and torch.equal(value, other)
                same = same or (other is None and are_weights(value))
            else:
                same = not plain or value == other or value != value
            if not same:
                return f"it keeps {'.'.join(filter(None, (name, key)))} from a call, and the adapter does not"
    return None
