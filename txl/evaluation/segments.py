"""Reading by segments with a memory of hidden states, as in training and in the released code."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.reader import Reader, check_clamp_len
from txl.model import Network
from txl.model.recurrent import RecurrentNetwork
from txl.model.transformer import HiddenMemory
from txl_kernels import RelAttention


class SegmentReader(Reader):
    """The released evaluation: a segment sees its memory of mem_len states and itself.

    So its tokens see from mem_len + 1 to mem_len + L keys, and the score depends on L.

    Args:
        mem_len: states each layer remembers; 0 for none. An LSTM or QRNN carries its state unless
            it is 0.
        clamp_len: largest distance told apart; None for the model's own.
    """

    def __init__(
        self, model: Network, batch: int, mem_len: int, max_segment: int, clamp_len: int | None = None
    ) -> None:
        super().__init__(model, batch, max_segment)
        if mem_len < 0:
            raise TxlError(f"mem_len must be >= 0, got {mem_len}")
        check_clamp_len(model, clamp_len)
        self.mem_len, self.clamp_len = mem_len, clamp_len
        self.reset()

    def reset(self) -> None:
        self.memory: HiddenMemory | None = None

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        self._check_segment(tokens)
        with seeing(self.model, self.mem_len + self.max_segment, self.clamp_len):
            states = self.model.read(tokens, self.memory, mem_len=self.mem_len)
        self.memory = states.memory
        return states.hidden


@contextmanager
def seeing(model: Network, attn_len: int, clamp_len: int | None, always: bool = False) -> Iterator[None]:
    """The model with another clamp_len (None changes nothing), and where it has a window of its own
    with one of attn_len keys; an LSTM or QRNN as it is.

    always: where it has none, too.
    """
    layers = [] if isinstance(model, RecurrentNetwork) else [block.attention for block in model.layers]
    own = [(attention.window, getattr(attention, "clamp_len", None)) for attention in layers]
    for attention in layers:
        if always or attention.window is not None:
            attention.window = attn_len
        if clamp_len is not None and isinstance(attention, RelAttention):
            attention.clamp_len = clamp_len
    try:
        yield
    finally:
        for attention, (window, clamp) in zip(layers, own, strict=True):
            attention.window = window
            if isinstance(attention, RelAttention):
                attention.clamp_len = clamp
