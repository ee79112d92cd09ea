"""The registry of known classes, by name and by source, and their accelerated classes, which are
made when first needed. Pickles find them in this module by their names.

`Accelerated<name of the peer>` is a subclass of the peer's adapter and of the original class. That
of a copy is `Accelerated<name>@<full name of its class, with : for .>`.
"""

import dataclasses
import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

from torch import nn
from torch.fx import Proxy

from txl_kernels.integrations.adapters import KNOWN
from txl_kernels.integrations.peer import EXPORTED, STATE, Accelerated, Peer
from txl_kernels.integrations.source import ReplacedCode, check_code, module_of, parts, source_hash

PREFIX = "Accelerated"
_peers: dict[str, Peer] = {peer.path: dataclasses.replace(peer, applies_window=True) for peer in KNOWN}


def peers() -> tuple[Peer, ...]:
    """Return all known peers, in the order in which they were registered."""
    return tuple(_peers.values())


def find(path: str) -> Peer | None:
    """Return the peer whose class has this full name, or None."""
    return _peers.get(path)


def by_name(name: str) -> Peer | None:
    return next((peer for peer in _peers.values() if peer.name == name), None)


def path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def similar_peers(module: nn.Module) -> Iterator[Peer]:
    """Yield the peers whose adapter takes the same arguments as the module's method and finds the
    attributes that it needs on the module; first those whose class has the same name."""
    name = "." + type(module).__name__
    for peer in sorted(_peers.values(), key=lambda peer: not peer.path.endswith(name)):
        adapter = peer.adapter
        own = getattr(type(module), adapter.method, None)
        if adapter.needs and own is not None and all(hasattr(module, name) for name in adapter.needs):
            try:
                fits = _fits(list(inspect.signature(own).parameters), getattr(adapter, adapter.method))
            except (TypeError, ValueError):
                fits = False
            if fits:
                yield peer


def _fits(theirs: list[str], ours: Any) -> bool:
    """Whether our method has their parameters in the same order, and no others without a
    default."""
    left = iter(theirs)
    following = next(left, None)
    for name, parameter in inspect.signature(ours).parameters.items():
        if name == following:
            following = next(left, None)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            return False
    return following is None


def find_copied_peer(module: nn.Module) -> Peer | None:
    """Return the peer of whose class the module's class is a copy, in any package, or None."""
    hashed = None
    for peer in similar_peers(module):
        try:
            hashed = hashed or source_hash(type(module))
        except (OSError, TypeError):
            return None
        if hashed in peer.hashes.values():
            return peer
    return None


def register(peer: Peer) -> None:
    """Add an attention class, or replace a known one.

    Raises:
        TypeError: the adapter is not a subclass of `Accelerated`.
        ValueError: the name is not an identifier, or another class has it.
    """
    if not (isinstance(peer.adapter, type) and issubclass(peer.adapter, Accelerated)):
        raise TypeError(f"peer.adapter must be a subclass of Accelerated, got {peer.adapter!r}")
    if not peer.name.isidentifier():
        raise ValueError(f"peer.name must be a Python identifier, got {peer.name!r}")
    other = by_name(peer.name)
    if other is not None and other.path != peer.path:
        raise ValueError(f"peer.name must be another than that of {other.path}, got {peer.name!r}")
    _peers[peer.path] = peer


def register_copy(kind: type[nn.Module], of: str) -> Peer:
    """Register a class, with its present source, as a copy of a known one.

    Whether both compute the same is not checked; `accelerate(model, verify=True)` checks it,
    without a registration.

    Args:
        kind: the class.
        of: the name of the peer that it is a copy of, one of `peers()`.

    Returns:
        The new peer.

    Raises:
        TypeError: kind is not a subclass of torch.nn.Module.
        ValueError: no peer has the name `of`.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"kind must be a subclass of torch.nn.Module, got {kind!r}")
    known = by_name(of)
    if known is None:
        raise ValueError(f"of must be one of {', '.join(peer.name for peer in peers())}, got {of!r}")
    path = path_of(kind)
    name = known.name + "_" + "".join(c if c.isalnum() else "_" for c in path)
    copy = dataclasses.replace(known, name=name, path=path, hashes={f"{path} as registered": source_hash(kind)})
    register(copy)
    return copy


def accelerated_class(peer: Peer, original: type) -> type:
    """Return the accelerated class of an original class, which is made once for each: a module that
    is loaded again has classes of the same names."""
    name = PREFIX + peer.name
    path = path_of(original)
    if path != peer.path:
        name += "@" + path.replace(".", ":")
    method = peer.adapter.method
    theirs = getattr(original, method)
    made: list[Any] = original.__subclasses__()
    found: Any = next((x for x in made if x.__name__ == name and issubclass(x, peer.adapter)), None)
    if found is None:
        ours = _falling_back(peer.adapter, theirs)
        found = type(name, (peer.adapter, original), {"__module__": __name__, "original": original, method: ours})
    # Anew in each call: patches of classes may have been undone, and peers registered again.
    found.peer, found.replaced = peer, theirs
    found.arguments = tuple(inspect.signature(theirs).parameters)[1:]
    found.forwards = {kind: kind.forward for kind in _known_parts(peer, original)}
    found.beside = module_of(next(kind for kind in original.__mro__ if method in vars(kind)))
    return found  # type: ignore[no-any-return]


def _known_parts(peer: Peer, original: type) -> list[Any]:
    """Return the classes of modules that an adapter may read past: some of torch's, and those that
    the original's code names in its own module, or the code of the peer's class in its module."""
    found: list[Any] = [nn.Dropout, nn.Identity]
    named = parts(original)
    if path_of(original) != peer.path and peer.path.rpartition(".")[0] in sys.modules:
        named += parts(peer.original())
    for part in named:
        if inspect.isclass(part) and issubclass(part, nn.Module):
            try:
                check_code(part)
            except ReplacedCode:
                continue
            except (OSError, TypeError):  # a notebook's class, for example
                pass
            found.append(part)
    return found


def _falling_back(adapter: type[Accelerated], theirs: Any) -> Any:
    """Return a method that calls the original if an adapter's method returns a reason, or if
    torch.fx.symbolic_trace traces the call. It shows the original's signature, by whose names
    others call it: torch.export, for example, and transformers' Trainer."""
    ours = getattr(adapter, adapter.method)
    by_name = _by_name(adapter, ours, theirs)

    @functools.wraps(ours)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Proxy) for x in (*args, *kwargs.values())):
            return self.fall_back(EXPORTED, *args, **kwargs)
        state = self.__dict__[STATE]
        if "trial" in state:
            state["trial"].append((args, kwargs))
        tried = state.get("tried")
        result = None if tried is None else tried.why_not(self, args, kwargs)
        if result is None:
            result = ours(self, *args, **kwargs) if by_name is None else by_name(self, args, kwargs)
        return self.fall_back(result, *args, **kwargs) if isinstance(result, str) else result

    method.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]
    return method


def _by_name(adapter: type[Accelerated], ours: Any, theirs: Any) -> Callable[..., Any] | None:
    """Return a function of (self, args, kwargs) that calls an adapter's method where the original's
    has other parameters: by name, without those that the adapter does not know and that have their
    defaults. If they have others, it returns the reason. Return None where nothing differs."""
    own, other = (list(inspect.signature(f).parameters.values())[1:] for f in (ours, theirs))
    kinds = [{parameter.kind for parameter in found} for found in (own, other)]
    if any(Parameter.VAR_POSITIONAL in found for found in kinds):
        return None
    takes_any, gives_any = (Parameter.VAR_KEYWORD in found for found in kinds)
    named = {x.name: x.default for x in other if x.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)}
    known = {*(x.name for x in own), *adapter.reads}
    order = tuple(x.name for x in other if x.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD))
    in_order = order == tuple(x.name for x in own)[: len(order)]
    if in_order and named.keys() <= known and takes_any == gives_any:
        return None

    def by_name(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(order, args, strict=False)) | kwargs
        if len(given) < len(args) + len(kwargs):
            return "arguments that the original does not take"
        passed = {}
        for name, value in given.items():
            if name in known if name in named else takes_any and gives_any:
                passed[name] = value
            elif not _is_same(value, named.get(name, Parameter.empty)):
                return f"{name} given, which its adapter does not know"
        return ours(self, **passed)

    return by_name


def _is_same(value: Any, default: Any) -> bool:
    plain = isinstance(default, (bool, int, float, str)) and type(value) is type(default)
    return value is default or (plain and bool(value == default))


def __getattr__(name: str) -> Any:
    """Return an accelerated class by name, for pickles; imports the package of the original
    class."""
    known, _, copy = name.removeprefix(PREFIX).partition("@")
    peer = by_name(known) if name.startswith(PREFIX) else None
    if peer is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not copy:
        return accelerated_class(peer, peer.original())
    return accelerated_class(peer, pkgutil.resolve_name(copy.replace(":", ".")))
