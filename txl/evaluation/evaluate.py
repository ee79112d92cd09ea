"""Evaluation: the loss of a split, each token scored once, by one of three methods of reading
it."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import (
    Engine,
    Reader,
    SegmentReader,
    WindowReader,
    check_window,
    seeing,
)
from txl.fields import COUNT, check_ranges, check_types
from txl.model import Network
from txl.model.config import ModelConfig, RecurrentConfig
from txl.model.recurrent import RecurrentNetwork
from txl.text.corpus import as_tensor
from txl.text.streams import Counting, scored_segments
from txl.text.vocabulary import Tokens

Method = Literal["cached", "segments", "sliding"]
MAX_ZEROS = 2**16  # maximum attention length with zero states before a shorter text; published: up to 3,800


@dataclass(frozen=True)
class Reading:
    """Options of reading a text; None leaves a choice to `resolve`.

    Attributes:
        attn_len: maximum number of keys a token sees, its own position included. It replaces the
            model's own window.
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
    method: Method | None = None
    segment: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(self, attn_len=COUNT, segment=COUNT)


class ResolvedReading(NamedTuple):
    """A `Reading` with all choices made; its fields are explained there."""

    method: Method
    attn_len: int
    segment: int


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
    """

    attn_len: int
    tokens: int
    nats: float
    seconds: float

    @property
    def bpc(self) -> float:
        """Bits per token, nats / ln 2; bits per character if tokens are bytes."""
        return self.nats / math.log(2)

    @property
    def ppl(self) -> float:
        """Perplexity per token, e^nats."""
        return perplexity(self.nats)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def perplexity(nats: float) -> float:
    """Return e^nats, or infinity if that overflows a float."""
    return math.exp(nats) if nats < 700 else math.inf


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
    asked: Reading, model: Network, attn_len: int | None = None, segment: int = 128, batch: int = 1
) -> ResolvedReading:
    """Fill in the choices that a reading leaves open.

    Args:
        attn_len: the default; None if it must be given.
        segment: the default for "segments"; that for "cached" is `ModelConfig.cached_segment`, and
            for "sliding" 1.
        batch: number of parallel texts.

    Raises:
        TxlError: attn_len is missing.
    """
    method, attn_len = asked.method or default_method(model), asked.attn_len or attn_len
    if attn_len is None:
        raise TxlError("a reading needs attn_len, the keys that a token sees")
    if method == "cached" and isinstance(model.config, ModelConfig):
        segment = model.config.cached_segment(batch)
    return ResolvedReading(method, attn_len, asked.segment or (1 if method == "sliding" else segment))


def bounded(reading: ResolvedReading, model: Network, tokens: int) -> ResolvedReading:
    """Return a reading without the keys and steps that a text of so many tokens cannot use; the
    losses are the same. Zero states before a text are keys, too, so they are not left out.

    Raises:
        TxlError: a text begins with zero states, and attn_len exceeds both its length and
            MAX_ZEROS.
    """
    method, reach, segment = reading
    zeros = isinstance(model.config, ModelConfig) and model.config.initial_memory == "zeros"
    if method == "sliding" or not zeros:
        return ResolvedReading(method, min(reach, tokens), min(segment, tokens))
    if reach > max(tokens, MAX_ZEROS):
        raise TxlError(
            f"attn_len must be at most {max(tokens, MAX_ZEROS):,} for a text of {tokens:,} tokens that begins with zero "
            f"states, which are attended, got {reach:,}"
        )
    return ResolvedReading(method, reach, min(segment, tokens) if method == "cached" else segment)


def make_reader(model: Network, batch: int, reading: ResolvedReading) -> Reader:
    """Make a reader of `batch` parallel texts that begins with the model's own initial memory."""
    method, attn_len, segment = reading
    if method == "cached":
        return Engine(model, batch, attn_len, segment)
    if method == "segments":
        mem_len = 1 if isinstance(model, RecurrentNetwork) else attn_len - segment
        return SegmentReader(model, batch, mem_len, segment)
    return WindowReader(model, batch, attn_len, segment)


@torch.inference_mode()
def evaluate(
    model: Network,
    tokens: Tokens,
    start: int,
    reading: Reading | ResolvedReading,
    *,
    batch: int = 8,
    limit: int | None = None,
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
        counting, sentences: which tokens are scored; see `scored_segments`.
        progress: called with the number of tokens scored so far.

    Raises:
        TxlError: the split is empty, an argument does not fit the model, or the loss is not finite.
    """
    tokens, began = tokens[:limit], time.perf_counter()
    training, scored = model.training, 0
    total = torch.zeros((), dtype=torch.float64, device=model.device)  # read once, so that the host runs ahead
    reading = reading if isinstance(reading, ResolvedReading) else resolve(reading, model, batch=batch)
    try:
        for losses, count in _losses(model, tokens, start, reading, batch, counting, sentences):
            total += losses.double().sum()
            scored += count
            if progress:
                progress(scored)
    finally:
        model.train(training)
    nats = float(total) / scored  # waits for the device
    if not math.isfinite(nats):
        raise TxlError(f"the loss of the text is {nats}: the model's parameters are damaged, or it diverged")
    return Score(reading.attn_len, scored, nats, time.perf_counter() - began)


def _losses(
    model: Network,
    tokens: Tokens,
    start: int,
    reading: ResolvedReading,
    batch: int,
    counting: Counting,
    sentences: bool,
) -> Iterator[tuple[Tensor, int]]:
    """Yield the losses of each step and the number of scored tokens among them."""
    if len(tokens) == 0:
        raise TxlError("the split to evaluate is empty")
    if reading.method == "sliding" or (reading.method == "segments" and not isinstance(model, RecurrentNetwork)):
        reading = reading._replace(segment=min(reading.segment, reading.attn_len))
    method, reach, segment = bounded(reading, model, len(tokens))
    if method == "sliding":
        if counting != "all":
            raise TxlError("method 'sliding' scores every token: it goes with counting 'all' only")
        for losses in sliding_losses(model, tokens, start, reach, segment, batch):
            yield losses, len(losses)
        return
    batch = min(batch, len(tokens))
    reader = make_reader(model, batch, ResolvedReading(method, reach, segment))
    for block in scored_segments(tokens, start, batch, segment, counting, sentences):
        count = int((block[1] >= 0).sum())  # before they are on the device, which would be waited for
        inputs, targets = (x.to(model.device) for x in block)
        yield reader.nll(inputs, targets), count


@torch.inference_mode()
def sliding_losses(
    model: Network, tokens: Tokens, start: int, attn_len: int, stride: int, batch: int
) -> Iterator[Tensor]:
    """Yield the losses of a split read in windows of attn_len tokens, the last `stride` of each
    scored.

    Windows are independent, so the split is not cut into streams: each token sees attn_len - stride
    + 1 to attn_len keys, or, near the start, all tokens before it (`start` is the first).

    Yields: losses [n], in order of the tokens.

    Raises:
        TxlError: as `check_window`.
    """
    check_window(model, attn_len, stride)
    model.eval()

    def inputs(begin: int, end: int) -> Tensor:
        """Inputs that predict tokens begin .. end - 1: tokens begin - 1 .. end - 2, where -1 is
        `start`."""
        part = as_tensor(tokens[max(begin - 1, 0) : end - 1])
        return torch.cat([torch.tensor([start], device="cpu"), part]) if begin == 0 else part

    # Windows at the start are shorter, and the last one may score fewer tokens.
    ends = chain(range(stride, len(tokens), stride), [len(tokens)])
    for (length, scored), alike in groupby(ends, lambda end: (min(end, attn_len), (end - 1) % stride + 1)):
        while some := list(islice(alike, batch)):
            block = torch.stack([inputs(end - length, end) for end in some]).to(model.device)
            targets = torch.stack([as_tensor(tokens[end - scored : end]) for end in some]).to(model.device)
            with seeing(model, None):
                hidden = model.read(block, mem_len=0, last=scored).hidden
            yield model.softmax.nll(hidden, targets).flatten()
