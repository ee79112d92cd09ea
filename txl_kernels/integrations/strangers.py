"""What a model's attention modules are where none of them is known, and why none is taken."""

from collections.abc import Iterator

from torch import nn

from txl_kernels.integrations.registry import nearest, path_of


def strangers(model: nn.Module) -> Iterator[str]:
    """A line for each class whose name holds "Attention": where it is first met, how often, and why
    it is not taken."""
    found: dict[type, list[str]] = {}
    modules: dict[type, nn.Module] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if "attention" in kind.__name__.lower():
            found.setdefault(kind, []).append(name or "(the model)")
            modules.setdefault(kind, module)
    for kind, names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more} ({path_of(kind)}): {_why(modules[kind])}"


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
