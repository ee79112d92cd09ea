"""The loss of a split, every token scored once, read in one of three ways."""

import time
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from txl.distributed import World
from txl.errors import TxlError
from txl.evaluation.engine import Engine
from txl.evaluation.reader import Reader
from txl.evaluation.score import Score
from txl.evaluation.segments import SegmentReader
from txl.evaluation.window import WindowReader, sliding_losses
from txl.model import Network
from txl.model.config import ModelConfig, RecurrentConfig
from txl.model.recurrent import RecurrentNetwork
from txl.text.streams import Counting, scored_segments
from txl.text.vocabulary import Tokens

Method = Literal["cached", "segments", "sliding"]
METHODS: tuple[Method, ...] = get_args(Method)


def default_method(model: Network) -> Method:
    """How a model is read when nothing is said.

    With recurrence cached where positions are relative, by segments as in training where they are
    absolute; without recurrence by a sliding window. An LSTM or QRNN by segments, its state
    carried.
    """
    if isinstance(model.config, RecurrentConfig):
        return "segments"
    if not model.config.mem_len:
        return "sliding"
    return "segments" if model.config.absolute else "cached"


@torch.inference_mode()
def evaluate(
    model: Network,
    tokens: Tokens,
    start: int,
    attn_len: int,
    *,
    method: Method | None = None,
    segment: int = 128,
    batch: int = 8,
    limit: int | None = None,
    clamp_len: int | None = None,
    carry_memory: bool = True,
    counting: Counting = "all",
    progress: Callable[[int], None] | None = None,
    world: World = World(),  # noqa: B008 - frozen
) -> Score:
    """Scores a split.

    Args:
        tokens: the split. start: the token before its first.
        attn_len: most keys a token sees, itself included.
            A window of the model's own gives way to it.
        method: "cached": each token sees exactly attn_len keys, and the score does not depend on
            `segment`. "segments": a memory of attn_len - segment hidden states, as the released
            evaluation with mem_len; tokens see from attn_len - segment + 1 keys on; an LSTM or
            QRNN carries its state, whatever attn_len. "sliding": a
            window of attn_len tokens read anew for every `segment` tokens, as the released
            evaluation without memory; segment = 1 is Al-Rfou et al.'s. None: `default_method`.
        segment: tokens a step.
        batch: parallel streams, each beginning without memory, so that few of them score long
            contexts best; for "sliding" windows side by side, of which the score is independent.
        limit: score only the first so many tokens.
        clamp_len: largest distance told apart; None for the model's own.
        carry_memory: False forgets everything at each segment.
        counting: which tokens are scored, see `scored_segments`.
        progress: called with the number of tokens scored so far.
        world: processes that share the work, streams or windows dealt to them; the score is that of
            one process, in all of them.

    Raises:
        TxlError: the split is empty, or an argument does not fit the model.
    """
    tokens, began = tokens[:limit], time.perf_counter()
    training, total, scored = model.training, 0.0, 0
    try:
        with world.together():  # an error of one is found before the others wait for its sum
            for losses, count in _own_losses(
                model, tokens, start, attn_len, method, segment, batch, clamp_len, carry_memory, counting, world
            ):
                total += float(losses.double().sum())
                scored += count
                if progress:
                    progress(min(scored * world.size, len(tokens)))
        total, scored = _together(total, scored, world, model.device)
    finally:
        model.train(training)
    return Score(attn_len, scored, total / scored, time.perf_counter() - began)


def _own_losses(
    model: Network, tokens: Tokens, start: int, attn_len: int, method: Method | None, segment: int, batch: int,
    clamp_len: int | None, carry_memory: bool, counting: Counting, world: World,
) -> Iterator[tuple[Tensor, int]]:  # fmt: skip
    """Losses of this process's streams or windows, step by step, and how many of them count."""
    if len(tokens) == 0:
        raise TxlError("the split to evaluate is empty")
    method = default_method(model) if method is None else method
    if method not in METHODS:
        raise TxlError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    carries = isinstance(model, RecurrentNetwork) and method == "segments"
    segment = segment if carries or method == "cached" else min(segment, attn_len)
    reach = attn_len
    zeros = isinstance(model.config, ModelConfig) and model.config.initial_memory == "zeros"
    if not zeros:  # no token sees more than there is
        reach, segment = min(attn_len, len(tokens)), min(segment, len(tokens))
    if method == "sliding":
        if counting != "all":
            raise TxlError("method 'sliding' scores every token: it goes with counting 'all' only")
        for losses in sliding_losses(model, tokens, start, reach, segment, batch, clamp_len, world):
            yield losses, len(losses)
        return
    batch = min(batch, len(tokens))
    rows = world.rows(batch)
    # A process without a stream has nothing to read.
    reader = make_reader(model, method, max(rows.stop - rows.start, 1), reach, segment, clamp_len)
    for block in scored_segments(tokens, start, batch, segment, None, counting):
        if rows.start == rows.stop:
            return
        if not carry_memory:
            reader.reset()
        inputs, targets = (x[rows].to(model.device) for x in block)
        yield reader.nll(inputs, targets), int((targets >= 0).sum())


def _together(total: float, scored: int, world: World, device: torch.device) -> tuple[float, int]:
    """Sums over all processes."""
    if world.size == 1:
        return total, scored
    both = world.total(torch.tensor([total, scored], dtype=torch.float64, device=device)).tolist()
    return both[0], int(both[1])


def make_reader(
    model: Network, method: Method, batch: int, attn_len: int, segment: int, clamp_len: int | None = None
) -> Reader:
    """What reads a text so that a token sees at most attn_len keys; arguments as in `evaluate`."""
    if method == "cached":
        return Engine(model, batch, attn_len, segment, clamp_len)
    if method == "segments":
        mem_len = 1 if isinstance(model, RecurrentNetwork) else attn_len - segment
        return SegmentReader(model, batch, mem_len, segment, clamp_len)
    return WindowReader(model, batch, attn_len, segment, clamp_len)
