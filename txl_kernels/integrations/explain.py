"""An explanation of how a module is classified, for users whose module was not accelerated."""

import difflib
import inspect

from torch import nn

from txl_kernels.integrations.accelerate import check_module, classify, recognise
from txl_kernels.integrations.peer import Accelerated, Peer
from txl_kernels.integrations.registry import path_of
from txl_kernels.integrations.source import parts, source_hash

LINES = 60  # the most lines of a difference


def explain(module: nn.Module) -> str:
    """Return a text that says as which class `accelerate` recognises an attention module, or how it
    differs from a known one.

    The modules that contain it are ignored; pass the model to `accelerate` for a report of all
    modules.

    Raises:
        TypeError: module is not a module.
    """
    check_module("module", module)
    if isinstance(module, Accelerated):
        return f"{path_of(module.original)}: accelerated by the adapter of {module.peer.path}"
    path = path_of(type(module))
    found = recognise(module)
    if found is None:
        return (
            f"{path}: like no attention that is known; register(Peer(...)) adds one, "
            "register_copy(its class, of=...) a copy of a known one"
        )
    peer, reason, note = found
    row, accepted, _ = classify("", module, (), False)
    assert row is not None
    if accepted is not None:
        return f"{path}: taken for {peer.path}{note or ', by name and source'}; accelerate(model) accelerates it"
    if reason is None:
        return f"{path}: taken for {peer.path}{note}; {row.done}"
    lines = [f"{path}: {reason}", f"tested: {peer.tested()}", *_differences(peer, type(module))]
    how = "" if path == peer.path else ", verify=True"
    lines.append(
        f"accelerate(model{how}) tries it out and takes it where it computes the same; "
        f"register_copy({type(module).__name__}, of={peer.name!r}) takes your word for it"
    )
    return "\n".join(lines)


def _differences(peer: Peer, kind: type) -> list[str]:
    """Return the lines of a difference between the tested source, if its package is installed as
    tested, and the module's."""
    try:
        original = peer.original()
        tested = source_hash(original) in peer.hashes.values()
        theirs, ours = (
            [line for part in parts(c) for line in inspect.getsource(part).splitlines()] for c in (original, kind)
        )
    except (ImportError, AttributeError, OSError, TypeError) as error:
        return [f"({peer.distribution} as tested is not here to compare with: {error})"]
    if not tested:
        return [f"({peer.distribution} as tested is not here to compare with, but {peer.version()})"]
    changes = list(difflib.unified_diff(theirs, ours, peer.path, path_of(kind), lineterm="", n=1))
    more = [f"(and {len(changes) - LINES} lines more)"] if len(changes) > LINES else []
    return [*changes[:LINES], *more]
