"""RECL of a group of models from their losses at several context lengths (paper, Appendix C)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from txl.errors import TxlError
from txl.evaluation.evaluate import perplexity

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Effective:
    """What a longer context is worth to one model of a group.

    Attributes:
        length: the RECL: the shortest context whose next step gains less than the threshold, but
            no more than the model's own limit; the longest context if all steps gain.
        reached_end: every step up to the longest context gained, so that `length` is a lower bound.
        short: e^f(c, c) for each context but the last, the same for all models of a group.
        long: e^f(c, c') for the step after each of them.
        gains: (short - long) / short.
    """

    length: int
    reached_end: bool
    short: list[float]
    long: list[float]
    gains: list[float]


def relative_losses(losses: Mapping[str, Array], ratio: float) -> tuple[Array, dict[str, Array]]:
    """f_i(c, c) and f_i(c, c') of each model, for each context c and the next one, c'.

    The positions that count, T(c), are the `ratio` of them with the largest baseline b(c, t), the
    least loss of any model with context c; they are chosen anew for each c.

    Args:
        losses: of each model [C, N], in nats: l_i(c, t) for C contexts, in order, at N positions.
        ratio: r of the paper, in (0, 1].

    Returns:
        f(c, c), [C - 1], which is the same for all models, and f_i(c, c') [C - 1] of each.

    Raises:
        TxlError: ratio is out of range, or the losses are not finite or of different shapes.
    """
    if not 0 < ratio <= 1:
        raise TxlError(f"ratio must be in (0, 1], got {ratio}")
    if not losses:
        raise TxlError("losses must hold at least one model")
    shapes = {name: x.shape for name, x in losses.items()}
    first = next(iter(shapes.values()))
    if any(shape != first for shape in shapes.values()) or len(first) != 2 or first[0] < 2 or first[1] < 1:
        raise TxlError(f"losses must be [C >= 2, N >= 1] and alike for all models, got {shapes}")
    for name, x in losses.items():
        if not np.isfinite(x).all():
            raise TxlError(f"the losses of {name} are not all finite")
    baseline = np.minimum.reduce([x.astype(np.float64) for x in losses.values()])
    count = max(round(ratio * baseline.shape[1]), 1)
    # Stable, so that of equal losses the earlier positions count.
    hardest = np.argsort(-baseline[:-1], axis=1, kind="stable")[:, :count]
    base = np.take_along_axis(baseline[:-1], hardest, 1)
    short = base.mean(1)
    long = {
        name: np.minimum(base, np.take_along_axis(x[1:].astype(np.float64), hardest, 1)).mean(1)
        for name, x in losses.items()
    }
    return short, long


def effective_context(
    losses: Mapping[str, Array],
    contexts: Sequence[int],
    ratio: float = 1.0,
    *,
    threshold: float = 0.01,
    limits: Mapping[str, int | None] | None = None,
) -> dict[str, Effective]:
    """The RECL of each model of a group.

    Args:
        losses: as in `relative_losses`.
        contexts: the C lengths, increasing, in tokens.
        threshold: the relative gain below which a step ends the search (the paper's 0.01).
        limits: longest context that a model can use; its RECL is no longer.

    Raises:
        TxlError: as in `relative_losses`, or contexts are not increasing or not C of them.
    """
    short, long = relative_losses(losses, ratio)
    if len(contexts) != len(short) + 1 or any(b <= a for a, b in pairwise(contexts)):
        raise TxlError(f"contexts must be {len(short) + 1} increasing lengths, got {list(contexts)}")
    found = {}
    for name, f in long.items():
        gains = [float(-math.expm1(b - a)) for a, b in zip(short, f, strict=True)]  # 1 - e^f(c, c') / e^f(c, c)
        stop = next((i for i, gain in enumerate(gains) if gain < threshold), None)
        length = contexts[-1] if stop is None else contexts[stop]
        limit = (limits or {}).get(name)
        limited = limit is not None and limit < length
        found[name] = Effective(
            limit if limited and limit is not None else length,
            stop is None and not limited,
            [perplexity(x) for x in short],
            [perplexity(x) for x in f],
            gains,
        )
    return found


def perplexities(losses: Array) -> list[float]:
    """e^(mean loss) of each context (paper, figure 4); losses [C, N]."""
    return [perplexity(x) for x in losses.mean(1)]
