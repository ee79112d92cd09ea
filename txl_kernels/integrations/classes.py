"""The accelerated classes, made when first asked for, so that pickles find them by name here.

`Accelerated<name of the peer>`: a subclass of the peer's adapter and of the original class.
"""

import sys
from typing import Any

from txl_kernels.integrations.peer import Peer

PREFIX = "Accelerated"


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
    from txl_kernels.integrations.registry import by_name

    peer = by_name(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if peer is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return accelerated_class(peer, peer.original())
