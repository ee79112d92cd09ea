"""The attention modules of a model of which none is known, and why none is taken."""

from collections.abc import Iterator

from torch import nn

from txl_kernels.integrations.registry import nearest, path_of


def strangers(model: nn.Module) -> Iterator[str]:
    """A line for each class of attention, by its name: where it is first met, how often, and why it
    is not taken."""
    found: dict[type, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if any(word in type(module).__name__.lower() for word in ("attention", "attn", "mha")):
            found.setdefault(type(module), []).append((name or "(the model)", module))
    for kind, [(name, first), *others] in found.items():
        more = f" and {len(others)} more" if others else ""
        yield f"{name}{more} ({path_of(kind)}): {_why(first)}"


def _why(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "plain attention, without relative positions"
    near = nearest(module)
    if near is None:
        return "its attributes are not those of a known relative attention"
    peer, lacking = near
    if lacking:
        return f"nearest to {peer.path}, but without {', '.join(lacking)}"
    return f"has the attributes of {peer.path}, but its {peer.adapter.method} takes other arguments"
