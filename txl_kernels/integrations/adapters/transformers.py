"""What transformers' speech encoders have in common."""

import sys
from typing import Any

import torch

from txl_kernels.integrations.attention import AdditiveMask, Bounds, four_axes, mask_bounds, visible

DISTRIBUTION = "transformers"
MODELS = "transformers.models"


def attentions_wanted(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether weights are to be returned: by argument, configuration, or whoever collects
    outputs."""
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    if torch.compiler.is_compiling():  # whoever collects outputs cannot either
        return False
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    wanted = None if collector is None else collector.get()
    return wanted is not None and "attentions" in wanted


IMPLEMENTATIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def own_way(module: Any, kwargs: dict[str, Any]) -> str | None:
    """Why a call wants the original, whatever the tensors, or None."""
    if attentions_wanted(module, kwargs) and module.setting("weights") == "fallback":
        return "attention weights asked for"
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return None if implementation in IMPLEMENTATIONS else f"an attention function of one's own, {implementation!r}"


def bounds_or_reason(mask: Any) -> Bounds | str:
    """Bounds of a mask [B, 1, L, S], bool or additive, or why there are none."""
    reason = four_axes(mask)
    if reason is not None:
        return reason
    try:
        bounds = mask_bounds(mask, visible)
    except AdditiveMask:
        return "an additive mask of other numbers than 0 and -inf"
    return "a mask with holes" if bounds is None else bounds
