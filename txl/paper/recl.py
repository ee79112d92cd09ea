"""The relative effective context length (RECL; paper, section 4.3 and Appendix C)."""

import hashlib
import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.evaluate import perplexity
from txl.evaluation.window import learned_positions
from txl.language_model import LanguageModel
from txl.model.config import ModelConfig
from txl.paths import AnyPath, open_regular, replace_bytes
from txl.pictures import label, new_figure, save
from txl.text.corpus import as_tensor
from txl.text.vocabulary import Tokens, content

Array = npt.NDArray[np.float64]
LONGEST_CHAIN = 100
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Effective:
    """The gain of one model of a group from longer contexts.

    Attributes:
        length: the RECL: the shortest context from which the next step gains less than the
            threshold (the longest context if all steps gain), but at most the model's limit.
        reached_end: whether every step up to the longest context gained, so that `length` is a
            lower bound.
        short: e^f(c, c) for each context c but the last; the same for all models of a group.
        long: e^f(c, c') for each of them, with c' the next context.
        gains: (short - long) / short.
    """

    length: int
    reached_end: bool
    short: list[float]
    long: list[float]
    gains: list[float]


def effective_context(
    losses: Mapping[str, Array],
    contexts: Sequence[int],
    ratio: float = 1.0,
    *,
    threshold: float = 0.01,
    limits: Mapping[str, int | None] | None = None,
) -> dict[str, Effective]:
    """Compute the RECL of each model of a group.

    Args:
        losses, ratio: as in `relative_losses`.
        contexts: the C context lengths in tokens, increasing.
        threshold: relative gain below which the search ends (the paper's 0.01).
        limits: the longest context that each model can use, an upper bound of its RECL; None for no
            limit.

    Raises:
        TxlError: as in `relative_losses`, or contexts are not increasing, or their number is not C.
    """
    short, long = relative_losses(losses, ratio)
    if len(contexts) != len(short) + 1 or any(b <= a for a, b in pairwise(contexts)):
        raise TxlError(f"contexts must be {len(short) + 1} increasing lengths, got {list(contexts)}")
    found = {}
    for name, f in long.items():
        gains = [float(-math.expm1(b - a)) for a, b in zip(short, f, strict=True)]  # 1 - e^f(c, c') / e^f(c, c)
        stop = next((i for i, gain in enumerate(gains) if gain < threshold), None)
        length = contexts[-1] if stop is None else contexts[stop]
        limit = (limits or {}).get(name) or length
        found[name] = Effective(
            min(length, limit),
            stop is None and length <= limit,
            [perplexity(x) for x in short],
            [perplexity(x) for x in f],
            gains,
        )
    return found


def relative_losses(losses: Mapping[str, Array], ratio: float) -> tuple[Array, dict[str, Array]]:
    """Compute f_i(c, c) and f_i(c, c') of each model i, for each context c and the next one, c'.

    They are means over T(c): the fraction `ratio` of the positions with the largest baseline b(c,
    t), which is the lowest loss of any model with context c. T(c) is chosen anew for each c.

    Args:
        losses: [C, N] for each model, in nats: l_i(c, t) for C contexts, in order, at N positions.
        ratio: the paper's r, in (0, 1].

    Returns:
        f(c, c), [C - 1], which is the same for all models, and f_i(c, c'), [C - 1] for each model.

    Raises:
        TxlError: ratio is out of range, or the losses are not finite or differ in shape.
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
    # A stable sort: of equal losses the earlier positions are taken.
    hardest = np.argsort(-baseline[:-1], axis=1, kind="stable")[:, :count]
    base = np.take_along_axis(baseline[:-1], hardest, 1)
    short = base.mean(1)
    long = {
        name: np.minimum(base, np.take_along_axis(x[1:].astype(np.float64), hardest, 1)).mean(1)
        for name, x in losses.items()
    }
    return short, long


class Run(NamedTuple):
    """Tokens from `start` on that are read at once from an empty state.

    Attributes:
        ends: increasing lengths of the contexts that the run measures; the last is the run's
            length.
        first: index of the first of these contexts; the others follow in order.
        place: index of the position that the first context predicts; the others follow in order.
    """

    start: int
    ends: tuple[int, ...]
    first: int
    place: int


@dataclass(frozen=True)
class Layout:
    """Positions of a text and the runs that measure their losses.

    Predicting token t from exactly c tokens takes a run that begins with an empty state at t - c.
    The positions of a chain are `step` apart, so they share runs: a run from s predicts s + step
    with context step, s + 2 step with context 2 step, and so on. A chain of m positions with C
    contexts takes m + C - 1 runs instead of m C.

    Args:
        tokens: length of the text.
        samples: number of positions; fewer if the text is too short for so many.
        step, contexts: context lengths are step, 2 step, .. contexts * step.

    Raises:
        TxlError: an argument is below 1, there are fewer than 2 contexts, or the text is too short
            for one position with the longest context.
    """

    tokens: int
    samples: int = 2000
    step: int = 100
    contexts: int = 10

    def __post_init__(self) -> None:
        for name, minimum in (("samples", 1), ("step", 1), ("contexts", 2)):
            if getattr(self, name) < minimum:
                raise TxlError(f"{name} must be >= {minimum}, got {getattr(self, name)}")
        if self.tokens <= self.longest:
            raise TxlError(
                f"the text has {self.tokens:,} tokens, too few for one position after a context of {self.longest:,}: use a "
                "longer text, or smaller --step or --contexts"
            )

    @property
    def longest(self) -> int:
        return self.step * self.contexts

    @property
    def lengths(self) -> list[int]:
        """Context lengths in tokens."""
        return [self.step * (n + 1) for n in range(self.contexts)]

    def chains(self) -> list[tuple[int, int]]:
        """Return the first position and the number of positions of each chain. No position is in
        two chains.

        A lane is all positions `step` apart over the whole text. If one lane has enough positions,
        the chains are spread over it.
        """
        usable = self.tokens - self.longest  # positions longest .. tokens - 1
        wanted = min(self.samples, usable)
        lanes = self._lanes(wanted)
        total, done = sum(there for _, there in lanes), 0
        chains: list[tuple[int, int]] = []
        for offset, there in lanes:
            share = (done + there) * wanted // total - done * wanted // total
            done += there
            parts = -(-share // LONGEST_CHAIN)
            bounds = [share * part // max(parts, 1) for part in range(parts + 1)]
            for part, (begin, end) in enumerate(pairwise(bounds)):
                skipped = part * (there - share) // parts  # positions between this chain and the next
                chains.append((self.longest + offset + (begin + skipped) * self.step, end - begin))
        return chains

    def _lanes(self, wanted: int) -> list[tuple[int, int]]:
        """Return offset and number of positions of the fewest lanes that have `wanted`
        positions."""
        usable = self.tokens - self.longest
        for count in range(max(-(-wanted // -(-usable // self.step)), 1), self.step + 1):
            offsets = [lane * self.step // count for lane in range(count)]
            lanes = [(offset, -(-(usable - offset) // self.step)) for offset in offsets if offset < usable]
            if sum(there for _, there in lanes) >= wanted:
                return lanes
        raise AssertionError("every position is in one of `step` lanes")

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the positions of the predicted tokens, [N], in the order of the chains."""
        return np.concatenate([first + np.arange(count) * self.step for first, count in self.chains()])

    def runs(self, limit: int | None = None) -> list[Run]:
        """Return all runs, the longest first.

        limit: the longest context a model can use. If it is not one of the lengths, it is measured
        by separate runs, as the first context above the limit.
        """
        usable = self.contexts if limit is None else min(limit // self.step, self.contexts)
        found, before = [], 0
        for first, count in self.chains():
            for n in range(1 - self.contexts, count):  # index of the position before the run's first step
                begin, end = max(-n, 0), min(count - n, usable)  # range of contexts for which the chain has positions
                if end > begin:
                    ends = tuple(self.lengths[begin:end])
                    found.append(Run(first + (n - 1) * self.step, ends, begin, before + n + begin))
            before += count
        if limit is not None and usable < self.contexts and usable * self.step != limit:
            found += [Run(int(t) - limit, (limit,), usable, n) for n, t in enumerate(self.positions())]
        return sorted(found, key=lambda run: (-run.ends[-1], run.first, run.start))

    def cost(self, limit: int | None = None) -> int:
        """Return the number of tokens to read for all positions."""
        return sum(run.ends[-1] for run in self.runs(limit))


class ContextLosses(Protocol):
    """A model to measure: a function that returns losses."""

    def __call__(self, tokens: Tensor, ends: list[int], targets: Tensor) -> Tensor:
        """Return -log P(targets[:, i] | tokens[:, :ends[i]]) in nats, float [B, K].

        tokens: [B, n], read from an empty state. ends: K increasing lengths, the last is n.
        targets: [B, K].
        """


@dataclass(frozen=True)
class NetworkLosses:
    """`ContextLosses` of a trained model.

    A context of c tokens is read as one segment of c tokens without memory. Each token sees all
    tokens before it, or the model's own window of them.
    """

    language_model: LanguageModel

    @property
    def limit(self) -> int | None:
        """The longest context of a model with absolute positions, which is training's segment,
        since later positions were never trained; None for other models."""
        config, segment = self.language_model.model.config, self.language_model.segment
        if not isinstance(config, ModelConfig) or not config.absolute:
            return None
        return min(learned_positions(self.language_model.model) or segment, segment)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, ends: list[int], targets: Tensor) -> Tensor:
        model = self.language_model.model
        hidden = model.read(tokens, mem_len=0).hidden
        places = torch.tensor(ends, device=hidden.device) - 1
        return model.softmax.nll(hidden[:, places], targets)


def measure(
    predict: ContextLosses,
    tokens: Tokens,
    layout: Layout,
    *,
    limit: int | None = None,
    values: Array | None = None,
    device: torch.device | str = "cpu",
    batch_tokens: int = BATCH_TOKENS,
    watch: Callable[[int], None] = lambda done: None,
) -> Array:
    """Measure losses l(c, t) of one model at exact context lengths: each prediction reads c tokens
    from an empty state.

    Args:
        tokens: the text, [layout.tokens].
        limit: the longest context the model can use; longer ones get its loss (`l(c > K) = l(K)`).
        values: [C, N] from an interrupted measurement, NaN where not yet measured; filled in place.
        batch_tokens: maximum number of tokens of the runs that are read as one batch.
        watch: called after each batch with the number of tokens read so far, of
            `layout.cost(limit)`.

    Returns:
        values, in nats, [C, N].
    """
    values = np.full((layout.contexts, len(layout.positions())), np.nan) if values is None else values
    runs, done = layout.runs(limit), 0
    for (ends, first), group in groupby(runs, key=lambda run: (run.ends, run.first)):
        alike, steps = list(group), np.arange(len(ends))
        size = max(batch_tokens // ends[-1], 1)
        for batch in (alike[n : n + size] for n in range(0, len(alike), size)):
            starts, places = (np.array(x)[:, None] for x in ([r.start for r in batch], [r.place for r in batch]))
            if np.isnan(values[first + steps, places + steps]).any():
                block, targets = tokens[starts + np.arange(ends[-1])], tokens[starts + np.array(ends)]
                nll = predict(as_tensor(block).to(device), list(ends), as_tensor(targets).to(device))
                values[first + steps, places + steps] = nll.double().cpu().numpy()
            done += len(batch) * ends[-1]
            watch(done)
    reached = max(run.first + len(run.ends) for run in runs)
    values[reached:] = values[reached - 1]
    return values


def fingerprint(checkpoint: str, tokens: Tokens, layout: Layout) -> str:
    """Return the SHA-256 of all that measured losses depend on; checkpoint: the digest of the
    model."""
    values = [checkpoint, content(tokens), LONGEST_CHAIN, *astuple(layout)]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def keep_losses(path: Path, values: Array) -> None:
    """Write losses, replacing the file atomically."""
    file = io.BytesIO()
    np.savez(file, values=values)
    replace_bytes(path, file.getvalue())


def kept_losses(path: Path, layout: Layout) -> Array:
    """Read losses [C, N] that `keep_losses` wrote; all NaN if the file is missing or damaged."""
    nothing = np.full((layout.contexts, len(layout.positions())), np.nan)
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as kept:
            values: Array = kept["values"].astype(np.float64)
    except (
        OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, RuntimeError, zipfile.BadZipFile, zlib.error
    ):  # fmt: skip
        return nothing
    return values if values.shape == nothing.shape else nothing


def draw_gains(found: Mapping[str, Effective], contexts: Sequence[int], ratio: float, path: AnyPath) -> None:
    """Draw figure 3: e^f(c, c) - e^f(c, c') of each step."""
    _draw(
        {name: [a - b for a, b in zip(each.short, each.long, strict=True)] for name, each in found.items()},
        [f"{a}\n{b}" for a, b in pairwise(contexts)],
        path,
        xlabel="from a context of c (above) to c' (below), tokens",
        ylabel="$e^{f(c, c)} - e^{f(c, c')}$",
        title=f"Gain of a longer context over the group's best, r = {ratio:g}",
    )


def draw_perplexity(found: Mapping[str, Sequence[float]], contexts: Sequence[int], path: AnyPath) -> None:
    """Draw figure 4: perplexity over context length."""
    words = {"xlabel": "context, tokens", "ylabel": "perplexity of a token", "title": "Perplexity against context"}
    _draw(found, contexts, path, **words)


def _draw(lines: Mapping[str, Sequence[float]], at: Sequence[int | str], path: AnyPath, **words: str) -> None:
    figure = new_figure()
    axes = figure.add_subplot()
    for name, values in lines.items():
        axes.plot(at, values, "o-", label=label(name))
    axes.set(**words)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
