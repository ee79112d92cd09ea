"""Evaluation: the loss of a split, each token scored once, by one of three methods of reading
it."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import Engine, Reader, SegmentReader
from txl.evaluation.window import WindowReader, sliding_losses
from txl.model import Network, as_transformer
from txl.model.config import ModelConfig, RecurrentConfig
from txl.paper.recurrent import RecurrentNetwork
from txl.text.streams import Counting, scored_segments
from txl.text.vocabulary import Tokens

Method = Literal["cached", "segments", "sliding"]
METHODS: tuple[Method, ...] = get_args(Method)
Sizes = Mapping[Method, tuple[int, int]]  # attn_len and segment for a method


@dataclass(frozen=True)
class Reading:
    """Options of reading a text; None leaves a choice to `resolve`.

    Attributes:
        attn_len: maximum number of keys a token sees, its own position included. It replaces the
            model's own window.
        clamp_len: distances above it are encoded as clamp_len; None for the model's own.
        zeros: whether a text begins with zero states that are attended to, as many as a token can
            see.
        method: "cached": each token sees exactly attn_len keys, and the loss does not depend on
            `segment`. "segments": each segment has a memory of attn_len - segment hidden states, as
            in the released evaluation with mem_len, so tokens see at least attn_len - segment + 1
            keys; an LSTM or QRNN carries its state, whatever attn_len. "sliding": every `segment`
            tokens, a window of attn_len tokens is computed from an empty memory, as in the released
            evaluation without memory; segment = 1 is the evaluation of Al-Rfou et al. None: see
            `default_method`.
        segment: number of tokens per step.

    Raises:
        TxlError: a number is below 1, or there is no such method.
    """

    attn_len: int | None = None
    clamp_len: int | None = None
    zeros: bool | None = None
    method: Method | None = None
    segment: int | None = None

    def __post_init__(self) -> None:
        for name in ("attn_len", "clamp_len", "segment"):
            check_positive(name, getattr(self, name))
        if self.method not in (None, *METHODS):
            raise TxlError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")


@dataclass(frozen=True)
class ResolvedReading:
    """A `Reading` with all choices made; its fields are explained there.

    Attributes:
        clamp_len: None for the model's own.
    """

    method: Method
    attn_len: int
    segment: int
    clamp_len: int | None
    zeros: bool


def check_positive(name: str, value: int | None) -> None:
    """Raise TxlError if `value` is neither None nor an integer >= 1."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise TxlError(f"{name} must be an integer >= 1, got {value!r}")


@dataclass(frozen=True)
class Score:
    """Result of an evaluation.

    Attributes:
        attn_len: maximum number of keys that a token saw.
        tokens: number of tokens scored. nats: mean loss of a token.
        sentences: number of sentences, if the corpus is of shuffled sentences; else None.
    """

    attn_len: int
    tokens: int
    nats: float
    seconds: float
    sentences: int | None = None

    @property
    def bpc(self) -> float:
        """Bits per token, nats / ln 2; bits per character if tokens are bytes."""
        return self.nats / math.log(2)

    @property
    def ppl(self) -> float:
        """Perplexity per token, e^nats."""
        return perplexity(self.nats)

    @property
    def ppl_with_starts(self) -> float | None:
        """Perplexity as the TensorFlow code computes it for One Billion Word: it also scores the
        `<S>` that opens each sentence, directly after the `<S>` that closes the last one. Here
        these tokens are counted with a loss of zero, so the value is a lower bound."""
        return perplexity(self.nats * self.tokens / (self.tokens + self.sentences)) if self.sentences else None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def perplexity(nats: float) -> float:
    """Return e^nats, or infinity if that overflows a float."""
    return math.exp(nats) if nats < 700 else math.inf


@dataclass(frozen=True)
class Lengths:
    """Columns of the paper's Table 6: perplexity at training's attention length ("init"), the best
    perplexity, and the shortest attention length whose perplexity is within 0.1% of the best."""

    init: Score
    best: Score
    shortest: Score


def init_and_best(scores: Sequence[Score], trained: int, gain: float = 1e-3) -> Lengths:
    """Return `Lengths` from scores at several attention lengths, which must include training's.

    Raises:
        ValueError: training's attention length is not among them.
    """
    ordered = sorted(scores, key=lambda s: s.attn_len)
    init = next((s for s in ordered if s.attn_len == trained), None)
    if init is None:
        raise ValueError(f"scores must hold training's attention length {trained}, got {[s.attn_len for s in ordered]}")
    best = min(ordered, key=lambda s: s.nats)
    shortest = next(s for s in ordered if s.ppl <= best.ppl * (1 + gain))
    return Lengths(init, best, shortest)


def default_method(model: Network) -> Method:
    """Return the default method of reading for a model.

    With recurrence: "cached" if positions are relative, else "segments", as in training. Without
    recurrence: "sliding". For an LSTM or QRNN: "segments", with its state carried.
    """
    if isinstance(model.config, RecurrentConfig):
        return "segments"
    if not model.config.mem_len:
        return "sliding"
    return "segments" if model.config.absolute else "cached"


def resolve(
    asked: Reading,
    model: Network,
    sizes: Sizes | None = None,
    method: Method | None = None,
) -> ResolvedReading:
    """Fill in the choices that a reading leaves open. All defaults are decided here.

    Args:
        sizes: default attn_len and segment for each method; with None attn_len must be given and
            segment is 128.
        method: the default method; None for `default_method`.

    Raises:
        TxlError: attn_len is missing, or zeros is given for an LSTM or QRNN.
    """
    method = asked.method or method or default_method(model)
    attn_len, segment = (asked.attn_len, 128) if sizes is None else sizes[method]
    attn_len = asked.attn_len or attn_len
    if attn_len is None:
        raise TxlError("a reading needs attn_len, the keys that a token sees")
    zeros = asked.zeros
    if zeros is None:
        zeros = _starts_with_zeros(model)
    else:
        as_transformer(model, "zeros")
    return ResolvedReading(method, attn_len, asked.segment or segment, asked.clamp_len, zeros)


def _starts_with_zeros(model: Network) -> bool:
    return isinstance(model.config, ModelConfig) and model.config.initial_memory == "zeros"


def starting_with(model: Network, zeros: bool) -> Network:
    """Return the model, or a copy with the same parameters and the other initial memory; see
    `Reading.zeros`."""
    if zeros == _starts_with_zeros(model):
        return model
    other = copy.copy(as_transformer(model, "zeros"))  # shares the parameters
    other.config = replace(other.config, initial_memory="zeros" if zeros else "empty")
    return other


def make_reader(model: Network, batch: int, reading: ResolvedReading) -> Reader:
    """Make a reader of `batch` parallel texts that begins with the model's own initial memory."""
    attn_len, segment, clamp_len = reading.attn_len, reading.segment, reading.clamp_len
    if reading.method == "cached":
        return Engine(model, batch, attn_len, segment, clamp_len)
    if reading.method == "segments":
        mem_len = 1 if isinstance(model, RecurrentNetwork) else attn_len - segment
        return SegmentReader(model, batch, mem_len, segment, clamp_len)
    return WindowReader(model, batch, attn_len, segment, clamp_len)


@torch.inference_mode()
def evaluate(
    model: Network,
    tokens: Tokens,
    start: int,
    reading: Reading | ResolvedReading,
    *,
    batch: int = 8,
    limit: int | None = None,
    carry_memory: bool = True,
    counting: Counting = "all",
    sentences: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Compute the loss of a split.

    Args:
        tokens: [n], the split. start: the token before the first.
        reading: how the split is read; defaults as in `resolve`.
        batch: number of parallel streams. Each begins without memory, so with long contexts a small
            batch scores best. For "sliding": number of windows computed at once, which does not
            change the loss.
        limit: score only the first `limit` tokens.
        carry_memory: False clears the memory at each segment.
        counting, sentences: which tokens are scored; see `scored_segments`.
        progress: called with the number of tokens scored so far.

    Raises:
        TxlError: the split is empty, or an argument does not fit the model.
    """
    tokens, began = tokens[:limit], time.perf_counter()
    training, total, scored = model.training, 0.0, 0
    reading = reading if isinstance(reading, ResolvedReading) else resolve(reading, model)
    try:
        for losses, count in _losses(model, tokens, start, reading, batch, carry_memory, counting, sentences):
            total += float(losses.double().sum())
            scored += count
            if progress:
                progress(scored)
    finally:
        model.train(training)
    return Score(reading.attn_len, scored, total / scored, time.perf_counter() - began)


def _losses(
    model: Network,
    tokens: Tokens,
    start: int,
    reading: ResolvedReading,
    batch: int,
    carry_memory: bool,
    counting: Counting,
    sentences: bool,
) -> Iterator[tuple[Tensor, int]]:
    """Yield the losses of each step and the number of scored tokens among them."""
    if len(tokens) == 0:
        raise TxlError("the split to evaluate is empty")
    model, method = starting_with(model, reading.zeros), reading.method
    reach, segment = reading.attn_len, reading.segment
    if method == "sliding" or (method == "segments" and not isinstance(model, RecurrentNetwork)):
        segment = min(segment, reach)
    if not reading.zeros:  # a token cannot see more keys than there are tokens
        reach, segment = min(reach, len(tokens)), min(segment, len(tokens))
    if method == "sliding":
        if counting != "all":
            raise TxlError("method 'sliding' scores every token: it goes with counting 'all' only")
        for losses in sliding_losses(model, tokens, start, reach, segment, batch, reading.clamp_len):
            yield losses, len(losses)
        return
    batch = min(batch, len(tokens))
    reader = make_reader(model, batch, replace(reading, attn_len=reach, segment=segment))
    for block in scored_segments(tokens, start, batch, segment, None, counting, sentences):
        if not carry_memory:
            reader.reset()
        inputs, targets = (x.to(model.device) for x in block)
        yield reader.nll(inputs, targets), int((targets >= 0).sum())
