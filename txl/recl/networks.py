"""Our networks as something whose losses can be measured at exact contexts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import check_clamp_len, seeing
from txl.evaluation.window import learned_positions
from txl.language_model import LanguageModel
from txl.model.config import ModelConfig
from txl.model.networks import as_transformer


@dataclass(frozen=True)
class NetworkLosses:
    """`ContextLosses` of a trained model.

    A context of c tokens is one segment of c tokens without memory, in which every token sees all
    before it, or the model's own window of them.

    Args:
        attn_len: most keys a token sees, itself included, in the place of a window of the model's
            own; None for that, or all.
        clamp_len: largest distance told apart; None for the model's own.

    Raises:
        TxlError: an argument does not fit the model.
    """

    language_model: LanguageModel
    attn_len: int | None = None
    clamp_len: int | None = None

    def __post_init__(self) -> None:
        network = self.language_model.model
        check_clamp_len(network, self.clamp_len)
        if self.attn_len is not None:
            as_transformer(network, "attn_len")
            if self.attn_len < 1:
                raise TxlError(f"attn_len must be None or >= 1, got {self.attn_len}")

    @property
    def limit(self) -> int | None:
        """Longest context of a model with absolute positions: training's segment, beyond which no
        position was ever seen; None for the others."""
        config, segment = self.language_model.model.config, self.language_model.segment
        if not isinstance(config, ModelConfig) or not config.absolute:
            return None
        return min(learned_positions(self.language_model.model) or segment, segment)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, ends: list[int], targets: Tensor) -> Tensor:
        model = self.language_model.model
        own = model.config.window if isinstance(model.config, ModelConfig) else None
        reach = self.attn_len or own or tokens.size(1)
        with seeing(model, reach, self.clamp_len, always=self.attn_len is not None):
            hidden = model.read(tokens, mem_len=0).hidden
        places = torch.tensor(ends, device=hidden.device) - 1
        return model.softmax.nll(hidden[:, places], targets)
