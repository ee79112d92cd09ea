"""The relative effective context length (RECL; paper, section 4.3 and Appendix C)."""

from txl.recl.gain import Effective, effective_context, relative_losses
from txl.recl.losses import ContextLosses, Losses, measure
from txl.recl.positions import Plan

__all__ = ["ContextLosses", "Effective", "Losses", "Plan", "effective_context", "measure", "relative_losses"]
