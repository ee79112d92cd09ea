"""A trial of a class whose source is unknown: the adapter of the class that it resembles must
compute the same, in outputs and gradients, on small random inputs.

A trial runs float32 copies of one module on the CPU, without hooks, and changes nothing outside
them: no generator, default or parameter. It shows that two codes agree on the inputs that it has;
`conditions` says what else the class' code depends on, and `Tried` which later calls are like
those of the trial.
"""

import copy
import enum
import hashlib
import sys
import time
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from txl_kernels.cache import content
from txl_kernels.integrations.conditions import LAYER_NUMBERS, Conditions, conditions_of
from txl_kernels.integrations.peer import STATE, Accelerated, Peer, RandomInputs, new_state
from txl_kernels.integrations.registry import accelerated_class
from txl_kernels.integrations.source import source_hash
from txl_kernels.integrations.trial_calls import autocast_of_cuda, passes
from txl_kernels.integrations.trial_results import difference, different_dropout, different_state, run
from txl_kernels.integrations.tried import Tried, parameters_of
from txl_kernels.integrations.wrapped import set_class
from txl_kernels.torch_state import is_plain

FRAMES = 13  # of most calls
MAX_FRAMES = 2048  # a class whose code compares lengths with more is left alone
UNREAD = 512  # frames of the longest call where the source cannot be read
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
            parts = [module.get_submodule(name) for name in peer.adapter.skips]  # which the adapter does not call
            read_past = tuple(part for part in parts if not type(part).__module__.startswith("torch."))
            found = conditions_of(type(module), module, read_past)
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
    except AttributeError as error:  # of a part that the adapter reads
        return f"it is not like {peer.path}: {error}"
    except Exception as error:  # code and attributes of any kind
        return f"it cannot be tried: {type(error).__name__}: {error}"


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
    can_ask = _can_ask_for_weights(type(module), adapter.method)
    for case in passes(single, short, other, long, adapter.mask_forms(slow)):
        if (case.autocast and asked) or (case.as_configured and "training" in compared):
            continue  # under autocast, code for CUDA may need other dtypes
        if case.as_configured:
            for module_copy in (slow, fast):
                for (owner, name), (own, _) in zip(_dropouts_of(module), _dropouts_of(module_copy), strict=True):
                    own[name] = owner[name]
        inputs = RandomInputs(case.frames, case.form, case.batch, case.gradients)
        sample = adapter.sample(slow, inputs, case.seen)
        if sample is None:
            return "there is no input to try it with"
        for module_copy in (slow, fast):
            module_copy.train(case.training)
            for part in module_copy.modules() if case.dropping_alone else ():
                if isinstance(part, nn.Dropout):
                    part.train()
        before = sum(fast.fallbacks.values())
        calls: list[Any] = []
        fast.__dict__[STATE]["trial"] = calls
        with autocast_of_cuda(case.autocast):
            theirs, ours = (run(x, *sample, inputs.made, case) for x in (slow, fast))
        answered = sum(fast.fallbacks.values()) == before
        wrong = difference(theirs, ours, case)
        if wrong is None and answered:
            wrong = different_dropout(theirs, ours) or different_state(slow, fast)
        less = any(y is None and x is not None for x, y in zip(theirs.outputs, ours.outputs, strict=False))
        if wrong is None and answered and less and not can_ask:
            wrong = "it returns attention weights in every call, and callers cannot say whether they want them"
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


def _can_ask_for_weights(original: type, method: str) -> bool:
    """Whether callers of a method can say that they want attention weights: by an argument, or by
    transformers' collector of outputs."""
    if original.__module__.startswith("transformers.") and "transformers.utils.output_capturing" in sys.modules:
        return True
    parameters = parameters_of(original, method)
    return any(x.kind is x.VAR_KEYWORD or "output_att" in x.name or "weights" in x.name for x in parameters)


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
    return hashlib.sha256(content(x)).digest()


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
