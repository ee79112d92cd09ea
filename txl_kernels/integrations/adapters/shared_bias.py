"""The base class of adapters whose layers share a relative bias: the first layer computes it from a
table and passes it to the others.

Originals pass a bias of all pairs, [.., L, S]. Accelerated layers pass [H, T], a bias for each
distance, farthest future first, if all layers of the stack are accelerated.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from txl_kernels.integrations.peer import Accelerated


class SharesBias(Accelerated):
    """An attention of a stack whose layers share biases.

    Attributes:
        blocks: the name of the stack's list of layers.
        inner: the name of the attention module in a layer.
    """

    converts = True
    blocks: ClassVar[str]
    inner: ClassVar[str]
    trial_settings: ClassVar[Mapping[str, Any]] = {"layers": {"whole": True}}

    @classmethod
    def stack(cls, ancestors: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the attention modules of the innermost stack; empty if there is none."""
        for module in reversed(ancestors):
            blocks = getattr(module, cls.blocks, None)
            if isinstance(blocks, nn.ModuleList):
                return [block.get_submodule(cls.inner) for block in blocks]
        return []

    @classmethod
    def why_not_alone(cls, module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
        """Return the reason why a module cannot be accelerated without its stack, or None."""
        if any(module is x for x in cls.stack(ancestors)):
            return None
        return "the stack whose layers share its biases is not at hand: accelerate the model that holds it"

    @classmethod
    def settings_from(cls, ancestors: Sequence[nn.Module]) -> dict[str, Any]:
        """Return a dict that all layers of the stack share. Its entry "whole" is True if all of
        them are accelerated. It holds no reference to a layer."""
        stack = cls.stack(ancestors)
        if not stack:
            return {}
        found: list[dict[str, bool] | None] = [x.setting("layers") for x in stack if isinstance(x, SharesBias)]
        shared = next((layers for layers in found if layers is not None), {})
        shared["whole"] = len(found) == len(stack)
        return {"layers": shared}

    def on_restore(self) -> None:
        layers = self.setting("layers")
        if layers is not None:
            layers["whole"] = False

    def why_no_bias(self, bias: Tensor | None, has_table: bool) -> str | None:
        """Return the reason why the original must answer a call with this bias, or None.

        has_table: whether the layer has the table from which the first layer computes the bias.
        """
        if bias is not None:
            return None if bias.dim() == 2 else "biases of all pairs, of a layer that the original answered"
        if not has_table:
            return "no table of biases"
        layers = self.setting("layers")
        return None if layers is not None and layers["whole"] else "another layer of its stack is not accelerated"


def farthest_first(length: int, device: torch.device) -> Tensor:
    """Return key position less query position for each column of biases [H, 2 L - 1], int64."""
    return torch.arange(length - 1, -length, -1, device=device)


def all_pairs(bias: Tensor, length: int) -> Tensor:
    """Expand biases [H, T] to [H, L, S], as originals expect them."""
    keys = bias.size(-1) + 1 - length
    at = torch.arange(length, device=bias.device).unsqueeze(1) - torch.arange(keys, device=bias.device)
    return bias[..., at + (keys - 1)]
