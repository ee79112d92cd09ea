"""Which classes are known; and the accelerated ones, made when first asked for, so that pickles
find them by name here.

`Accelerated<name of the peer>`: a subclass of the peer's adapter and of the original class.
"""

import sys
from typing import Any

from txl_kernels.integrations.adapters import KNOWN
from txl_kernels.integrations.peer import Accelerated, Peer

PREFIX = "Accelerated"
_peers: dict[str, Peer] = {peer.path: peer for peer in KNOWN}


def peers() -> tuple[Peer, ...]:
    """All that are known, in the order in which they were registered."""
    return tuple(_peers.values())


def find(path: str) -> Peer | None:
    """The peer whose class has this full name."""
    return _peers.get(path)


def by_name(name: str) -> Peer | None:
    return next((peer for peer in _peers.values() if peer.name == name), None)


def register(peer: Peer) -> None:
    """Adds an attention class of your own, or replaces one that is known.

    Raises:
        TypeError: the adapter is no subclass of `Accelerated`.
        ValueError: the name is no identifier or another class has it.
    """
    if not (isinstance(peer.adapter, type) and issubclass(peer.adapter, Accelerated)):
        raise TypeError(f"peer.adapter must be a subclass of Accelerated, got {peer.adapter!r}")
    if not peer.name.isidentifier():
        raise ValueError(f"peer.name must be a Python identifier, got {peer.name!r}")
    other = by_name(peer.name)
    if other is not None and other.path != peer.path:
        raise ValueError(f"peer.name must be another than that of {other.path}, got {peer.name!r}")
    _peers[peer.path] = peer


def accelerated_class(peer: Peer, original: type) -> type:
    """The one class for an original."""
    name = PREFIX + peer.name
    found = globals().get(name)
    if found is None or found.original is not original or not issubclass(found, peer.adapter):
        found = type(name, (peer.adapter, original), {"__module__": __name__, "original": original, "peer": peer})
        setattr(sys.modules[__name__], name, found)
    return found


def __getattr__(name: str) -> Any:
    """For unpickling: imports the peer's package."""
    peer = by_name(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if peer is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return accelerated_class(peer, peer.original())
