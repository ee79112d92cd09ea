"""Which classes are known."""

from txl_kernels.integrations.accelerated import Accelerated
from txl_kernels.integrations.adapters import KNOWN
from txl_kernels.integrations.peer import Peer

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
