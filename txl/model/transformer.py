"""The language models of the paper: embeddings, layers with memory, softmax."""

from torch import Tensor, nn

from txl.model.config import ModelConfig
from txl.model.initial import init_parameters
from txl.model.memory import HiddenMemory
from txl.model.softmax import AdaptiveSoftmax
from txl.model.trunk import States, Trunk

__all__ = ["States", "TransformerXL", "count_parameters"]


class TransformerXL(Trunk):
    """Language model; state is explicit: memory goes in, memory comes out.

    `ModelConfig` says which of the paper's systems it is. For evaluation and generation use
    `txl.Engine`, which caches keys and values where positions are relative.

    Attributes:
        softmax: log-probabilities and losses of hidden states.
        second_softmax: of the token after the next (`ModelConfig.second_target`), or None.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.softmax = AdaptiveSoftmax(config, self.embedding)
        self.second_softmax = AdaptiveSoftmax(config, None) if config.second_target else None
        init_parameters(self, config)

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., d_model] -> [.., vocab_size]; their softmax is that of the next token."""
        return self.softmax.logits(hidden)

    def forward(self, tokens: Tensor, memory: HiddenMemory | None = None) -> tuple[Tensor, HiddenMemory | None]:
        """Scores of the token after each position; arguments and errors as in `read`.

        Returns:
            logits [B, L, vocab_size], and the memory for the segment that follows, None if mem_len
            is 0.
        """
        states = self.read(tokens, memory)
        return self.logits(states.hidden), states.memory


def count_parameters(model: nn.Module) -> int:
    """Each shared parameter once."""
    return sum(p.numel() for p in model.parameters())
