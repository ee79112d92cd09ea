"""Bits per character of a split at an attention length, every token scored once, with caches."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from txl.errors import TxlError
from txl.evaluation.engine import Engine
from txl.model.transformer import TransformerXL
from txl.text.streams import scored_segments
from txl.text.vocabulary import Tokens


@dataclass(frozen=True)
class Score:
    """Result of an evaluation. bpc = nats / ln 2, ppl = e^nats."""

    attn_len: int
    tokens: int
    nats: float
    seconds: float

    @property
    def bpc(self) -> float:
        return self.nats / math.log(2)

    @property
    def ppl(self) -> float:
        return math.exp(self.nats) if self.nats < 700 else math.inf

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@torch.inference_mode()
def evaluate(
    model: TransformerXL,
    tokens: Tokens,
    start: int,
    attn_len: int,
    *,
    segment: int = 128,
    batch: int = 8,
    limit: int | None = None,
    carry_memory: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Scores a split.

    Args:
        tokens: the split. start: the token before its first.
        attn_len: keys each token sees, itself included.
        segment: tokens a step; the score does not depend on it.
        batch: parallel streams; each begins without memory, so few of them score long contexts
            best.
        limit: score only the first so many tokens.
        carry_memory: False forgets everything at each segment, as a model without recurrence must
            when it is run fast.
        progress: called with the number of tokens scored so far.

    Raises:
        TxlError: the split is empty, or attn_len is below 1.
    """
    if len(tokens) == 0:
        raise TxlError("the split to evaluate is empty")
    device = model.output_bias.device
    batch = min(batch, len(tokens[:limit]))
    training = model.training
    engine = Engine(model, batch, attn_len, segment)
    total, scored, began = 0.0, 0, time.perf_counter()
    try:
        for inputs, targets in scored_segments(tokens, start, batch, segment, limit):
            if not carry_memory:
                engine.reset()
            logits = engine(inputs.to(device))
            total += float(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(device), reduction="sum"))
            scored += int((targets >= 0).sum())
            if progress:
                progress(scored)
    finally:
        model.train(training)
    return Score(attn_len, scored, total / scored, time.perf_counter() - began)
