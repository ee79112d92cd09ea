"""A text read so that each layer's inputs are at hand, in memory that does not grow with it."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from txl.attention.terms import Terms, score_terms
from txl.errors import TxlError
from txl.evaluation.reader import check_clamp_len
from txl.evaluation.segments import seeing
from txl.model.memory import on_device
from txl.model.networks import Network, as_transformer
from txl.model.transformer import TransformerXL
from txl.text.corpus import as_tensor
from txl.text.tokens import Tokens
from txl_kernels.layer import SegmentAttention

SEGMENT = 128


class Part(NamedTuple):
    """One layer's terms for the queries first .. first + L - 1 of the text."""

    layer: int
    first: int
    terms: Terms


def check_attention(network: Network) -> TransformerXL:
    """A model whose scores have positions.

    Raises:
        TxlError: it has none.
    """
    model = as_transformer(network, "a picture of attention")
    if model.config.absolute:
        raise TxlError(
            f"encoding {model.config.encoding!r} has no positions in its scores; pictures are of 'relative', 'shaw' and "
            "'shaw-released'"
        )
    return model


@torch.inference_mode()
def read_terms(
    network: Network, tokens: Tokens, start: int, window: int, clamp_len: int | None = None, segment: int = SEGMENT
) -> Iterator[list[Part]]:
    """Every layer's terms for all queries that see whole windows of real tokens.

    Args:
        tokens: the text, [n]. start: the token before its first.
        window: keys of each query, itself included; a window of the model's own gives way.
        clamp_len: largest distance told apart; None for the model's own.
        segment: queries at a time.

    Yields:
        For each segment the layers' parts, in order; the number of a query is that of its token in
        the text.

    Raises:
        TxlError: the model has no positions in its scores, or the text no query with a whole
            window.
    """
    model = check_attention(network).eval()
    check_clamp_len(model, clamp_len)
    if window < 1 or segment < 1:
        raise TxlError(f"window and segment must be >= 1, got {window} and {segment}")
    if len(tokens) < window:
        raise TxlError(f"the text has {len(tokens):,} tokens, fewer than a window of {window:,}")
    memory: tuple[Tensor, ...] | None = None
    for first in range(0, len(tokens), segment):
        # The input of query t is token t - 1, whose successor it predicts.
        before = as_tensor(tokens[max(first - 1, 0) : min(first + segment, len(tokens)) - 1])
        inputs = torch.cat([torch.tensor([start]), before]) if first == 0 else before
        block = inputs.unsqueeze(0).to(model.device)
        with seeing(model, window, clamp_len, always=True):
            states = model.read(block, memory, mem_len=max(window - 1, 1))
            skipped = max(window - 1 - first, 0)  # queries whose windows are not whole yet
            count = len(model.layers) if skipped < block.size(1) else 0
            parts = [
                Part(i, first + skipped, _terms(model, i, states.inputs[i], memory, skipped, window))
                for i in range(count)
            ]
        if parts:
            yield parts
        memory = None if states.memory is None else tuple(on_device(x) for x in states.memory)


def _terms(
    model: TransformerXL, layer: int, hidden: Tensor, memory: tuple[Tensor, ...] | None, skipped: int, window: int
) -> Terms:
    block = model.layers[layer]
    assert isinstance(block.attention, SegmentAttention)
    past = hidden[:, :skipped] if memory is None else torch.cat([memory[layer], hidden[:, :skipped]], 1)
    return score_terms(
        block.attention, block.attention_input(hidden[:, skipped:]), block.attention_input(past), window
    )  # fmt: skip
