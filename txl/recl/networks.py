"""Our networks as something whose losses can be measured at exact contexts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.reader import check_clamp_len
from txl.evaluation.segments import seeing
from txl.evaluation.window import learned_positions
from txl.language_model import LanguageModel
from txl.model.config import ModelConfig


@dataclass(frozen=True)
class NetworkLosses:
    """`ContextLosses` of a trained model.

    A context of c tokens is one segment of c tokens without memory, in which every token sees all
    before it, or the last `attn_len`; a window of the model's own gives way.

    Args:
        attn_len: most keys a token sees, itself included; None for all.
        clamp_len: largest distance told apart; None for the model's own.

    Raises:
        TxlError: an argument does not fit the model.
    """

    language_model: LanguageModel
    attn_len: int | None = None
    clamp_len: int | None = None

    def __post_init__(self) -> None:
        check_clamp_len(self.language_model.model, self.clamp_len)
        if self.attn_len is not None and self.attn_len < 1:
            raise TxlError(f"attn_len must be None or >= 1, got {self.attn_len}")

    @property
    def limit(self) -> int | None:
        """Longest context of a model with absolute positions: its table, or training's segment,
        beyond which no position was ever learned; None for the others."""
        config = self.language_model.model.config
        if not isinstance(config, ModelConfig) or not config.absolute:
            return None
        return learned_positions(self.language_model.model) or self.language_model.segment

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, ends: list[int], targets: Tensor) -> Tensor:
        model = self.language_model.model
        reach = tokens.size(1) if self.attn_len is None else self.attn_len
        with seeing(model, reach, self.clamp_len, always=self.attn_len is not None):
            hidden = model.read(tokens, mem_len=0).hidden
        places = torch.tensor(ends, device=hidden.device) - 1
        return model.softmax.nll(hidden[:, places], targets)
