"""A trial of a class whose source is unknown: the adapter of the class that it resembles must
compute the same, in outputs and gradients, on small random inputs.

A trial runs float32 copies of one module on the CPU, without hooks, and changes nothing outside
them: no generator, default or parameter. It shows that two codes agree on the inputs that it has;
`conditions` says what else the class' code depends on, and `Tried` which later calls are like
those of the trial.
"""

import contextlib
import copy
import enum
import hashlib
import inspect
import math
import time
import types
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from txl_kernels.integrations.attention import dropouts
from txl_kernels.integrations.conditions import LAYER_NUMBERS, Conditions, conditions_of, words
from txl_kernels.integrations.peer import STATE, Accelerated, Peer, RandomInputs, new_state
from txl_kernels.integrations.registry import accelerated_class
from txl_kernels.integrations.source import source_hash
from txl_kernels.integrations.tried import Tried
from txl_kernels.integrations.wrapped import set_class
from txl_kernels.torch_state import is_plain

TOLERANCE = 2e-4  # relative to the largest value of a tensor; another formula differs by much more
ROUNDING = 2e-6  # of gradients, relative to the largest of all: one may be zero but for rounding
FRAMES = 13  # of most calls
MAX_FRAMES = 2048  # a class whose code compares lengths with more is left alone
UNREAD = 512  # frames of the longest call where the source cannot be read
_DRAWS = words("""
    rand randn randint randperm bernoulli multinomial normal poisson rand_like randn_like randint_like bernoulli_ uniform_
    normal_ random_ exponential_ geometric_ cauchy_ log_normal_ rrelu
""")
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_verdicts: "weakref.WeakKeyDictionary[type, dict[Any, Tried | str]]" = weakref.WeakKeyDictionary()


class _NotTried(Exception):
    """The error of a module that cannot be tried, with the reason."""


def verdict(module: nn.Module, peer: Peer, ancestors: Sequence[nn.Module], asked: bool) -> Tried | str:
    """Return the calls of a module that the peer's adapter answers as the module does, or the
    reason why it is not taken.

    The result is kept for modules of the class with equal plain attributes, equal buffers, and
    parameters of the same names, shapes and dtypes.

    asked: True to rely on the comparison alone, where the source cannot be read or depends on what
    a trial does not vary: larger lengths, the dtype, the device, random numbers.
    """
    try:
        if peer.adapter.sample is Accelerated.sample:
            return f"there is no trial for {peer.name}"
        _check_can_be_tried(module)
        settings = peer.adapter.settings_from(ancestors) | dict(peer.adapter.trial_settings)
        plain = [_key(module, by_layer) for by_layer in (False, True)]
        keys = [None if key is None else (peer.adapter, asked, key, _plain(settings)) for key in plain]
        kept = _verdicts.setdefault(type(module), {})
        large, by_layer, undecided = UNREAD, True, None
        try:
            source_hash(type(module))  # is the source that of the code?
            for key in keys:
                if key is not None and key in kept:
                    return kept[key]
            found = conditions_of(type(module), module, _read_past(module, peer))
        except (OSError, TypeError) as error:
            if not asked:
                return f"a trial needs the class' source ({error})"
        else:
            large, by_layer, undecided = found.largest, found.by_layer, _why_not_decided(found)
        if undecided is not None and not asked:
            result: Tried | str = undecided
        else:
            result = _tried(module, peer, settings, min(large, MAX_FRAMES), asked)
        if keys[by_layer] is not None:
            kept[keys[by_layer]] = result
        return result
    except _NotTried as reason:
        return str(reason)


def _check_can_be_tried(module: nn.Module) -> None:
    """Raise _NotTried for a module of which a copy on the CPU does not compute the same."""
    if torch.get_default_dtype() != torch.float32:
        raise _NotTried(f"a trial needs the default dtype float32, not {torch.get_default_dtype()}")
    if not is_plain() or torch.compiler.is_compiling():
        raise _NotTried("a trial does not run under a tracer or a transform")
    for part in module.modules():
        if is_parametrized(part):
            raise _NotTried("a trial does not copy parametrized modules")
        if "forward" in part.__dict__ or hasattr(part, "_hf_hook"):
            raise _NotTried("a trial does not copy modules whose forward is wrapped")
    for x in (*module.parameters(), *module.buffers()):
        if x.device.type == "meta":
            raise _NotTried("a trial needs parameters, which are on the meta device")
        if type(x) not in (Tensor, nn.Parameter, nn.Buffer):
            raise _NotTried(f"a trial does not copy tensors of the class {type(x).__name__}")
        if x.is_inference():
            raise _NotTried("a trial does not copy inference tensors")
    for x in module.parameters():
        if not x.is_floating_point() or x.itemsize == 1:
            raise _NotTried(f"a trial does not copy parameters of {x.dtype}")


def _why_not_decided(found: Conditions) -> str | None:
    """Return the reason why a trial does not decide about a class, whose code depends on what it
    does not vary, or None."""
    if found.draws is not None:
        return f"a trial cannot decide, because its code draws random numbers: {found.draws}"
    if found.kinds is not None:
        return f"a trial cannot decide, because its code depends on a dtype or a device: {found.kinds}"
    if found.largest > MAX_FRAMES - 5:
        named = f"{found.largest}: {found.named}"
        return f"a trial has at most {MAX_FRAMES} frames, and its code may compare lengths with {named}"
    return None


def _read_past(module: nn.Module, peer: Peer) -> tuple[nn.Module, ...]:
    """Return the submodules that the original calls and the adapter does not."""
    parts = [module.get_submodule(name) for name in peer.adapter.skips]
    return tuple(part for part in parts if not type(part).__module__.startswith("torch."))


def _tried(module: nn.Module, peer: Peer, settings: dict[str, Any], large: int, asked: bool) -> Tried | str:
    began = time.perf_counter()
    try:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.inference_mode(False):
            result = _compared(module, peer, settings, large, asked)
    except Exception as error:  # a module that raises any error is refused
        return f"in a trial as {peer.name} it raises {type(error).__name__}: {error}"
    if isinstance(result, Tried):
        result.seconds = time.perf_counter() - began
        return result
    return f"in a trial as {peer.name}, {result}"


def _compared(module: nn.Module, peer: Peer, settings: dict[str, Any], large: int, asked: bool) -> Tried | str:
    adapter = peer.adapter
    slow: Any = _copied(module, adapter.omitted)
    _perturb(slow)
    fast: Any = _copied(slow, ())
    fast.__dict__[STATE] = new_state(weights="none", **settings)
    set_class(fast, accelerated_class(peer, type(module)))
    tried = Tried(type(module), adapter.method)
    single, short, other, long = (
        adapter.sample_length(slow, least) for least in (1, FRAMES, FRAMES + 3, max(large, FRAMES) + 5)
    )
    compared: set[str] = set()
    for case in _passes(single, short, other, long, adapter.mask_forms(slow)):
        if (case.autocast and asked) or (case.as_configured and "training" in compared):
            continue  # under autocast, code for CUDA may need other dtypes
        if case.as_configured:
            for copied in (slow, fast):
                _copy_dropout(module, copied)
        inputs = RandomInputs(case.frames, case.form, case.batch, case.gradients)
        sample = adapter.sample(slow, inputs, case.seen)
        if sample is None:
            return "there is no input to try it with"
        for copied in (slow, fast):
            copied.train(case.training)
            for part in copied.modules() if case.dropping_alone else ():
                if isinstance(part, nn.Dropout):
                    part.train()
        before = sum(fast.fallbacks.values())
        calls: list[Any] = []
        fast.__dict__[STATE]["trial"] = calls
        with _autocast_of_cuda(case.autocast):
            theirs, ours = (_run(x, *sample, inputs.made, case) for x in (slow, fast))
        answered = sum(fast.fallbacks.values()) == before
        wrong = _difference(theirs, ours, case)
        if wrong is None and answered:
            wrong = _different_dropout(theirs, ours) or _different_state(slow, fast)
        if wrong is not None:
            return f"{case.label}: {wrong}"
        if case.gradients and not theirs.gradients:
            if not asked:
                return "it has no gradients on a CPU to compare"
            tried.gradients = False
        if answered:
            compared |= {"training" if case.training else "evaluation", "long" if case.frames >= long else "short"}
            for args, kwargs in calls:
                tried.record(fast, args, kwargs)
    if not {"evaluation", "long"} <= compared:
        return "its own code had to answer: " + "; ".join(fast.fallbacks)
    tried.training = "training" in compared
    return tried


@dataclass(frozen=True)
class _Pass:
    """A call of a trial.

    Attributes:
        label: a description.
        frames: the number of frames, T.
        seen: the keys that queries see, bool [B, T, T], or None for all.
        form: the form of masks, of `mask_forms`.
        training: whether the modules are in training mode.
        gradients: whether gradients are compared.
        autocast: whether torch says that CUDA's autocast is on.
        batch: the number of sequences, B.
        scale: a factor of the frames.
        dropping_alone: whether dropout modules, and no others, are in training mode.
        itself: whether the outputs count of those queries alone that see their own key.
        as_configured: whether dropout probabilities are the module's own. Such a call is needed if
            the adapter answers no call in training mode with others.
    """

    label: str
    frames: int
    seen: Tensor | None
    form: str
    training: bool = False
    gradients: bool = True
    autocast: bool = False
    batch: int = 2
    scale: float = 1.0
    dropping_alone: bool = False
    itself: bool = False
    as_configured: bool = False

    @property
    def valid(self) -> Tensor | None:
        """The queries whose outputs count, bool [B, T], or None for all: those that see a key."""
        if self.seen is None:
            return None
        return self.seen.diagonal(dim1=1, dim2=2) if self.itself else self.seen.any(-1)


def _passes(single: int, short: int, other: int, long: int, forms: Sequence[str]) -> Iterator[_Pass]:
    masks: list[tuple[str, Tensor | None]] = [("without a mask", None), *_masks(short)]
    for form in forms:
        for training in (False, True):
            for number, (label, seen) in enumerate(masks):
                gradients = form == forms[0] and number == 2 * training  # once in each mode
                mode = " in training mode" if training else ""
                batch = 3 if seen is None else 2
                yield _Pass(f"{label}, {form}{mode}", short, seen, form, training, gradients, batch=batch)
    left = (torch.arange(short, device="cpu") >= torch.tensor([0, 4], device="cpu").view(-1, 1, 1)).expand(
        2, short, short
    )
    yield _Pass("with padding on the left", short, left, forms[0], gradients=False, itself=True)
    nothing = torch.ones(2, other, other, dtype=torch.bool, device="cpu")
    yield _Pass("with a mask that hides nothing", other, nothing, forms[0], gradients=False)
    yield _Pass(f"with a length of {single}", single, None, forms[0], gradients=False, batch=2)
    yield _Pass("with large values", short, None, forms[0], gradients=False, scale=8.0)
    yield _Pass(
        "with dropout modules alone in training mode", short, None, forms[0], gradients=False, dropping_alone=True
    )
    yield _Pass("under autocast", short, masks[1][1], forms[0], autocast=True)
    padding = (torch.arange(long, device="cpu") < long - 4).expand(1, long, long)
    for training, seen in ((False, None), (True, padding)):
        label = f"with {long} frames{' and padding' * training}"
        yield _Pass(label, long, seen, forms[0], training, gradients=False, batch=1)
    for label, seen in masks:
        yield _Pass(f"{label}, in training mode as configured", short, seen, forms[0], True, as_configured=True)


@contextlib.contextmanager
def _autocast_of_cuda(on: bool) -> Iterator[None]:
    """Set what torch.is_autocast_enabled() says in this thread; functions of the CPU do not
    change."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", on)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before)


def _masks(T: int) -> list[tuple[str, Tensor]]:
    at = torch.arange(T, device="cpu")
    padding = (at < torch.tensor([T, T - 4], device="cpu").view(-1, 1, 1)).expand(2, T, T)
    distance = at.unsqueeze(1) - at
    near = ((distance <= 4) & (distance >= -2)).expand(2, T, T)
    blind = near.clone()
    blind[1, 3:5] = False
    return [("with padding", padding), ("with limited context", near), ("with queries that see no key", blind)]


def _copied(module: nn.Module, omitted: tuple[str, ...]) -> nn.Module:
    """Return a float32 copy of a module on the CPU, without hooks.

    omitted: names of submodules that an empty list replaces.
    """
    left_out = [x for name in omitted for x in module.get_submodule(name).modules()]
    parts: list[Any] = [x for x in module.modules() if not any(x is y for y in left_out)]
    twins: dict[int, Any] = {id(x): x.__class__.__new__(x.__class__) for x in parts}
    memo: dict[int, Any] = dict(twins)  # of deepcopy: bound methods, for example, refer to the copies

    def tensor(x: Any) -> Any:
        if x is not None and id(x) not in memo:
            made = x.detach().to("cpu", torch.float32 if x.is_floating_point() else x.dtype, copy=True)
            memo[id(x)] = nn.Parameter(made) if isinstance(x, nn.Parameter) else made
        return memo.get(id(x))

    for part in parts:
        twin = twins[id(part)]
        nn.Module.__init__(twin)
        twin.training = part.training
        twin._parameters = {name: tensor(x) for name, x in part._parameters.items()}
        twin._buffers = {name: tensor(x) for name, x in part._buffers.items()}
        twin._non_persistent_buffers_set = set(part._non_persistent_buffers_set)
        twin._modules = {name: twins.get(id(x), nn.ModuleList()) for name, x in part._modules.items() if x is not None}
        twin._modules |= {name: None for name, x in part._modules.items() if x is None}
    for part in parts:
        own = twins[id(part)].__dict__
        for name, value in part.__dict__.items():
            if name not in own:
                own[name] = tensor(value) if isinstance(value, Tensor) else copy.deepcopy(value, memo)
    return twins[id(module)]  # type: ignore[no-any-return]


def _perturb(module: nn.Module) -> None:
    """Change what is loaded with parameters and often equal at first, and make dropout
    probabilities differ."""
    inputs = RandomInputs(0)
    with torch.no_grad():
        for p in {id(x): x for x in module.state_dict(keep_vars=True).values() if x.is_floating_point()}.values():
            if p.dim() <= 1 or bool((p == p.flatten()[0]).all()):
                p.add_(0.3 * inputs.normal(*p.shape))
            elif p.numel() < 2**14:  # tables and biases of heads
                p.add_(0.02 * inputs.normal(*p.shape))
    for number, (owner, name) in enumerate(_dropouts_of(module)):
        owner[name] = 0.1 + 0.3 / (number + 2)


def _dropouts_of(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the dictionaries and names of dropout probabilities, of modules and configurations."""
    found = []
    for part in module.modules():
        for owner in (vars(part), getattr(getattr(part, "config", None), "__dict__", {})):
            for name, value in owner.items():
                if type(value) is float and ("drop" in name or (name == "p" and isinstance(part, nn.Dropout))):
                    found.append((owner, name))
    return found


def _copy_dropout(module: nn.Module, copied: nn.Module) -> None:
    """Give a copy of a module the module's dropout probabilities."""
    for (owner, name), (twin, _) in zip(_dropouts_of(module), _dropouts_of(copied), strict=True):
        twin[name] = owner[name]


def _difference(theirs: "_Result", ours: "_Result", case: _Pass) -> str | None:
    """Return how outputs or gradients differ, or None."""
    valid, tolerance = case.valid, TOLERANCE * case.scale**2  # scores, whose rounding counts, are greater
    if len(theirs.outputs) != len(ours.outputs):
        return f"its result has {len(theirs.outputs)} parts, where the adapter's has {len(ours.outputs)}"
    for number, (wanted, found) in enumerate(zip(theirs.outputs, ours.outputs, strict=True)):
        name = "the output" if number == 0 else f"part {number} of the result"
        if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
            if wanted is not found and not (found is None and _are_weights(wanted)):
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


def _are_weights(x: Any) -> bool:
    """Whether a tensor holds attention weights: none is negative, and no row's sum exceeds 1."""
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
        return False
    x = x[~x.isnan().any(-1)]  # rows of queries that see no key
    return x.numel() > 0 and bool((x >= 0).all()) and bool((x.sum(-1) < 1.001).all())


class _Result:
    """The results of a call: outputs, gradients by name, and what dropout was applied to."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.gradients: dict[str, Tensor] = {}
        self.dropped: list[tuple[float, Tensor | None]] = []


def _run(module: Any, x: Tensor, call: Any, others: Sequence[Tensor], case: _Pass) -> _Result:
    result = _Result()
    with torch.set_grad_enabled(case.gradients):
        x = (case.scale * x.detach()).requires_grad_(case.gradients)
        try:
            outputs = list(_leaves(_called(module, x, call, result)))
        except NotImplementedError:  # FlexAttention has no gradients on a CPU
            with torch.no_grad():
                outputs = list(_leaves(_called(module, x.detach(), call, result)))
        made = [y for n, y in enumerate(outputs) if isinstance(y, Tensor) and (n == 0 or not _are_weights(y))]
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


def _called(module: Any, x: Tensor, call: Any, result: _Result) -> Any:
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


def _different_dropout(theirs: _Result, ours: _Result) -> str | None:
    """Return how dropout differs, or None: both drop attention weights with equal probabilities,
    and the same other tensors. The adapter's weights are in the kernels; the original's may be."""
    of_weights = {round(p, 6) for p, x in theirs.dropped if x is None or _are_weights(x)}
    in_kernels = {round(p, 6) for p, x in ours.dropped if x is None}
    if of_weights != in_kernels:
        names = [", ".join(map(str, sorted(x))) or "none" for x in (of_weights, in_kernels)]
        return f"its dropout of attention weights is {names[0]}, the adapter's {names[1]}"
    left = [(p, x) for p, x in theirs.dropped if x is not None and not _are_weights(x)]
    others = [(p, x) for p, x in ours.dropped if x is not None]
    if len(left) != len(others):
        return "it applies dropout to another tensor than its attention weights"
    for (p, x), (q, y) in zip(left, others, strict=True):
        if not math.isclose(p, q) or not _same(y, x):
            return "it applies dropout to other tensors than the adapter"
    return None


def _different_state(slow: nn.Module, fast: nn.Module) -> str | None:
    """Return what a module keeps from a call, and the adapter does not, or None; the adapter may
    leave out attention weights."""
    for (name, theirs), ours in zip(slow.named_modules(), fast.modules(), strict=True):
        held = {**vars(theirs), **theirs._buffers}
        for key, value in held.items():
            other = {**vars(ours), **ours._buffers}.get(key)
            plain = value is None or isinstance(value, (bool, int, float, str))
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                same = isinstance(other, Tensor) and value.shape == other.shape and torch.equal(value, other)
                same = same or (other is None and _are_weights(value))
            else:
                same = not plain or value == other or value != value
            if not same:
                return f"it keeps {'.'.join(filter(None, (name, key)))} from a call, and the adapter does not"
    return None


def _key(module: nn.Module, by_layer: bool) -> Any:
    """Return what a verdict depends on, hashable, or None: plain attributes, buffers, and names,
    shapes and dtypes of parameters, of a module and of those in it.

    by_layer: whether the layer's number counts.
    """
    ignored = () if by_layer else LAYER_NUMBERS
    found: list[Any] = []
    for name, part in module.named_modules():
        fresh = nn.Module().__dict__
        own = {k: v for k, v in vars(part).items() if k not in fresh and k not in ignored}
        plain = _plain(own)
        if plain is None:
            return None
        tensors = [*part._parameters.items(), *part._buffers.items()]
        passing = part._non_persistent_buffers_set
        shapes = tuple((k, k in passing, None if x is None else (tuple(x.shape), x.dtype)) for k, x in tensors)
        values = tuple(None if x is None else _bytes(x) for x in part._buffers.values())
        found.append((name, type(part), plain, shapes, values))
    return tuple(found)


def _bytes(x: Tensor) -> bytes:
    return hashlib.sha256(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


def _plain(value: Any) -> Any:
    """Return a hashable value that is equal for equal plain values, or None for others."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device)):
        return type(value), value
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        return value
    if isinstance(value, dict):
        parts: list[Any] = [(_plain(k), _plain(v)) for k, v in value.items()]
        return None if any(k is None or v is None for k, v in parts) else (dict, tuple(parts))
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_plain(x) for x in (sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)]
        return None if any(x is None for x in parts) else (type(value), tuple(parts))
    if type(value).__module__.partition(".")[0] != "torch" and hasattr(value, "__dict__") and not callable(value):
        inner = _plain(vars(value))
        return None if inner is None else (type(value), inner)
    return None
