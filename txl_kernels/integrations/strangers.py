"""The attention modules of a model that has no known ones, and why they are unknown."""

from collections.abc import Iterator

from torch import nn

from txl_kernels.integrations.registry import nearest, path_of


def strangers(model: nn.Module) -> Iterator[str]:
    """Yield a line for each class of attention (by its name): the first module, how many more there
    are, and why it is unknown."""
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
