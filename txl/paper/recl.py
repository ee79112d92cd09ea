"""The relative effective context length (RECL; paper, section 4.3 and Appendix C)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.evaluate import perplexity
from txl.fields import COUNT, check_ranges
from txl.language_model import LanguageModel
from txl.model.config import ModelConfig
from txl.paths import AnyPath
from txl.pictures import BLUE, OTHERS, RED, label, new_figure, save, whole_ticks
from txl.text.corpus import as_tensor
from txl.text.vocabulary import Tokens

Array = npt.NDArray[np.float64]
# A model to measure. From tokens [B, n] that are read from an empty state, K increasing lengths up
# to n, and targets [B, K], it returns -log P(targets[:, i] | tokens[:, :lengths[i]]), [B, K].
ContextLosses = Callable[[Tensor, list[int], Tensor], Tensor]
MAX_CHAIN = 100
BATCH_TOKENS = 8192  # maximum number of tokens of the runs that are read as one batch


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
        contexts: the context lengths in tokens, [C], increasing.
        threshold: relative gain below which the search ends (the paper's 0.01).
        limits: the longest context that each model can use, an upper bound of its RECL; None for no
            limit.

    Raises:
        TxlError: as in `relative_losses`.
    """
    short, long = relative_losses(losses, ratio)
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
        TxlError: ratio is out of range, or the losses are not finite.
    """
    if not 0 < ratio <= 1:
        raise TxlError(f"ratio must be in (0, 1], got {ratio}")
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


@dataclass(frozen=True)
class Layout:
    """Positions of a text at which losses are measured, `step` apart in chains.

    Predicting token t from exactly c tokens takes a run that begins with an empty state at t - c.
    The positions of a chain share runs: a run from s predicts s + step with context step, s + 2
    step with context 2 step, and so on. A chain of m positions with C contexts takes m + C - 1 runs
    instead of m C.

    Args:
        tokens: length of the text.
        samples: number of positions; fewer if the text is too short for so many.
        step, contexts: context lengths are step, 2 step, .. contexts * step.

    Raises:
        TxlError: an argument is below 1, there are fewer than 2 contexts, or the text is shorter
            than twice the longest context.
    """

    tokens: int
    samples: int = 2000
    step: int = 100
    contexts: int = 10

    def __post_init__(self) -> None:
        check_ranges(self, samples=COUNT, step=COUNT, contexts=(2, COUNT[1]))
        if self.tokens < 2 * self.longest:
            raise TxlError(
                f"the text has {self.tokens:,} tokens, fewer than two contexts of {self.longest:,}: use a longer text, or "
                "smaller --step or --contexts"
            )

    @property
    def longest(self) -> int:
        return self.step * self.contexts

    @property
    def lengths(self) -> list[int]:
        """Context lengths in tokens."""
        return [self.step * (n + 1) for n in range(self.contexts)]

    def chains(self) -> list[tuple[int, int]]:
        """Return the first position and the number of positions of each chain, spread over the
        text. All runs of `longest` tokens fit into the text."""
        usable = (self.tokens - 2 * self.longest) // self.step + 1
        wanted = min(self.samples, usable)
        parts = -(-wanted // MAX_CHAIN)
        bounds = [wanted * part // parts for part in range(parts + 1)]
        skipped = [part * (usable - wanted) // parts for part in range(parts)]  # positions before each chain
        return [
            (self.longest + (begin + more) * self.step, end - begin)
            for (begin, end), more in zip(pairwise(bounds), skipped, strict=True)
        ]

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the positions of the predicted tokens, [N], in the order of the chains."""
        return np.concatenate([first + np.arange(count) * self.step for first, count in self.chains()])


@dataclass(frozen=True)
class NetworkLosses:
    """The `ContextLosses` of a trained model.

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
        return segment

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
    device: torch.device | str = "cpu",
    watch: Callable[[int], None] = lambda done: None,
) -> Array:
    """Measure losses l(c, t) of one model at exact context lengths: each prediction reads c tokens
    from an empty state.

    Args:
        tokens: the text, [layout.tokens].
        limit: the longest context the model can use; longer ones than its last multiple of
            `layout.step` get the loss at that one.
        watch: called after each chain with the number of positions measured so far.

    Returns:
        losses in nats, [C, N].
    """
    usable = layout.contexts if limit is None else min(limit // layout.step, layout.contexts)
    ends, chains = layout.lengths[:usable], []
    size, done = max(BATCH_TOKENS // ends[-1], 1), 0
    for first, count in layout.chains():
        starts = (first - ends[-1] + layout.step * np.arange(count + usable - 1))[:, None]
        losses = []
        for some in (starts[n : n + size] for n in range(0, len(starts), size)):
            block, targets = tokens[some + np.arange(ends[-1])], tokens[some + np.array(ends)]
            nll = predict(as_tensor(block).to(device), ends, as_tensor(targets).to(device))
            losses.append(nll.double().cpu().numpy())
        runs = np.concatenate(losses)
        # Run n predicts the chain's position n - (usable - 1 - c) with the context of index c.
        rows = [runs[usable - 1 - c :][:count, c] for c in range(usable)]
        chains.append(np.stack(rows + [rows[-1]] * (layout.contexts - usable)))
        done += count
        watch(done)
    return np.concatenate(chains, 1)


def draw_gains(found: Mapping[str, Effective], contexts: Sequence[int], ratio: float, path: AnyPath) -> None:
    """Draw figure 3: e^f(c, c) - e^f(c, c') of each step."""
    _draw(
        {name: [a - b for a, b in zip(each.short, each.long, strict=True)] for name, each in found.items()},
        [f"{a}\n{b}" for a, b in pairwise(contexts)],
        path,
        xlabel="from a context of c (above) to c' (below), tokens",
        ylabel="gain in perplexity, exp f(c, c) - exp f(c, c')",
        title=f"Gain of a longer context over the group's best, r = {ratio:g}",
    )


def draw_perplexity(found: Mapping[str, Sequence[float]], contexts: Sequence[int], path: AnyPath) -> None:
    """Draw figure 4: perplexity over context length."""
    words = {"xlabel": "context, tokens", "ylabel": "perplexity of a token", "title": "Perplexity against context"}
    _draw(found, contexts, path, **words)


def _draw(lines: Mapping[str, Sequence[float]], at: Sequence[int | str], path: AnyPath, **words: str) -> None:
    figure = new_figure()
    axes = figure.add_subplot()
    looks = cycle(zip((BLUE, RED, *OTHERS[1:]), "osD^vP", strict=True))
    for (name, values), (color, marker) in zip(lines.items(), looks, strict=False):
        axes.plot(at, values, color=color, marker=marker, label=label(name))
    if not isinstance(at[0], str):
        whole_ticks(axes.xaxis)
    axes.set(**words)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
