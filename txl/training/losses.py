"""The loss of a segment in training, with the auxiliary losses of Al-Rfou et al. (2018)."""

from typing import NamedTuple

from torch import Tensor

from txl.model import Network, as_transformer
from txl.model.adaptive import IGNORED, AdaptiveSoftmax
from txl.model.transformer import HiddenMemory

SECOND_TARGET_WEIGHT = 0.5


class SegmentLoss(NamedTuple):
    """What a segment costs.

    Attributes:
        total: to be minimised, a scalar.
        nll: mean loss of the next token, in nats, a detached scalar.
        memory: for the segment that follows.
    """

    total: Tensor
    nll: Tensor
    memory: HiddenMemory | None


def layers_that_predict(n_layer: int, done: float) -> range:
    """Layers (from 0) below the last whose predictions still count after a share `done` of
    training: the l-th of n, from 1 on, for the first l / 2n."""
    return range(int(2 * n_layer * done), n_layer - 1)


def segment_loss(
    model: Network,
    tokens: Tensor,
    targets: Tensor,
    memory: HiddenMemory | None,
    *,
    ext_len: int = 0,
    intermediate: range = range(0),
) -> SegmentLoss:
    """Mean loss over the targets, and the auxiliary losses that are switched on.

    Args:
        tokens: [B, E + L], context that was read before and the segment.
        targets: [B, L], the successors of the last L tokens.
        memory: see `TransformerXL.read`.
        ext_len: tokens at the end that the next segment reads again.
        intermediate: layers below the last that predict, too.
    """
    scored = targets.size(1)
    states = model.read(tokens, memory, ext_len=ext_len)

    def mean(softmax: AdaptiveSoftmax, hidden: Tensor, wanted: Tensor) -> Tensor:
        nll = softmax.nll(hidden, wanted)
        return nll.sum() / (wanted != IGNORED).sum().clamp(min=1)

    def predicted(hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of the next token, and with that of the one after it if the model has a softmax for
        it."""
        hidden = hidden[:, -scored:]
        first = mean(model.softmax, hidden, targets)
        if model.second_softmax is None:
            return first, first
        # The last token's second successor is in the next segment. Of one token nothing is left,
        # yet the softmax takes part, so that every parameter gets a gradient.
        return first, first + SECOND_TARGET_WEIGHT * mean(model.second_softmax, hidden[:, :-1], targets[:, 1:])

    nll, total = predicted(states.hidden)
    for i in intermediate:
        total = total + predicted(as_transformer(model, "a loss of lower layers").finish(states.layers[i]))[1]
    return SegmentLoss(total, nll.detach(), states.memory)
