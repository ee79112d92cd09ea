"""The measures of a language model: nats, bits per character, perplexity."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """Result of an evaluation.

    Attributes:
        attn_len: most keys that a token saw.
        tokens: scored. nats: mean loss of one.
        sentences: of a corpus of shuffled sentences; None for others.
    """

    attn_len: int
    tokens: int
    nats: float
    seconds: float
    sentences: int | None = None

    @property
    def bpc(self) -> float:
        """Bits a token: nats / ln 2; bits per character where tokens are bytes."""
        return self.nats / math.log(2)

    @property
    def ppl(self) -> float:
        """e^nats a token."""
        return perplexity(self.nats)

    @property
    def ppl_with_starts(self) -> float | None:
        """As the TensorFlow code counts One Billion Word: it also scores the `<S>` that opens each
        sentence, after the one that closes the last. Taken here at no cost, so a lower bound."""
        return perplexity(self.nats * self.tokens / (self.tokens + self.sentences)) if self.sentences else None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def perplexity(nats: float) -> float:
    """e^nats, infinite where a float ends."""
    return math.exp(nats) if nats < 700 else math.inf


@dataclass(frozen=True)
class Lengths:
    """What the paper's Table 6 reports: perplexity at training's attention length ("init"), the
    best, and the shortest length whose perplexity is within 0.1% of the best."""

    init: Score
    best: Score
    shortest: Score


def init_and_best(scores: Sequence[Score], trained: int, gain: float = 1e-3) -> Lengths:
    """Of scores at several attention lengths, among them the one of training.

    Raises:
        ValueError: training's length is not among them.
    """
    ordered = sorted(scores, key=lambda s: s.attn_len)
    init = next((s for s in ordered if s.attn_len == trained), None)
    if init is None:
        raise ValueError(f"scores must hold training's attention length {trained}, got {[s.attn_len for s in ordered]}")
    best = min(ordered, key=lambda s: s.nats)
    shortest = next(s for s in ordered if s.ppl <= best.ppl * (1 + gain))
    return Lengths(init, best, shortest)
