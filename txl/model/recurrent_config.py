"""Sizes and options of an LSTM or QRNN, the recurrent networks of the paper's Table 8."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, get_args

from txl.errors import TxlError
from txl.model.network_config import NetworkConfig

Kind = Literal["lstm", "qrnn"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(NetworkConfig):
    """Layers of d_inner features, the last of d_model, as in Merity et al. (2017, 2018).

    Attributes:
        network: "lstm", or "qrnn" (Bradbury et al. 2017).
        dropout: of the embeddings and of each layer's output.
        mem_len: none; what it remembers is its state.
    """

    mem_len: ClassVar[int] = 0
    network: Kind
    n_layer: int = 3
    d_model: int = 400
    d_inner: int = 1750

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network not in KINDS:
            raise TxlError(f"network must be one of {', '.join(KINDS)}, got {self.network!r}")

    def attn_len(self, tgt_len: int) -> int:
        """As of a Transformer without memory: the tokens that gradients go through."""
        return tgt_len

    @property
    def widths(self) -> list[tuple[int, int]]:
        """Features into and out of each layer."""
        outer = [self.d_model, *[self.d_inner] * (self.n_layer - 1), self.d_model]
        return list(pairwise(outer))
