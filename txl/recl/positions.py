"""Where contexts are measured, so that one run over the text serves several of them.

Predicting t from exactly c tokens is a run that begins empty at t - c. Positions a step apart in
chains share runs: the one that begins at s gives t = s + step with context step, t = s + 2 step
with 2 step, and so on. A chain of m positions with C contexts takes m + C - 1 runs instead of m C.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from txl.errors import TxlError

LONGEST_CHAIN = 100


@dataclass(frozen=True)
class Run:
    """Tokens start .. start + length - 1, read from an empty state.

    Attributes:
        first: number of its first context, whose length is (first + 1) * step; they go on to
            length / step.
        place: number of the position that its first context predicts; the next ones follow.
    """

    start: int
    length: int
    first: int
    place: int


@dataclass(frozen=True)
class Plan:
    """Positions of a text, and the runs that measure them.

    Args:
        tokens: of the text.
        samples: positions wanted; fewer if the text has fewer.
        step, contexts: lengths are step, 2 step, .. contexts * step.

    Raises:
        TxlError: a number is below 1, there are fewer than 2 contexts, or the text is too short for
            one position with the longest.
    """

    tokens: int
    samples: int = 2000
    step: int = 100
    contexts: int = 10

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("step", 1), ("contexts", 2)):
            if getattr(self, name) < least:
                raise TxlError(f"{name} must be >= {least}, got {getattr(self, name)}")
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
        """Of the contexts, in tokens."""
        return [self.step * (n + 1) for n in range(self.contexts)]

    def chains(self) -> list[tuple[int, int]]:
        """First position and number of positions of each chain, all positions different.

        Lanes are positions a step apart over the whole text; where one lane has enough, the chains
        are spread over it.
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
                skipped = part * (there - share) // parts  # what is between the chains
                chains.append((self.longest + offset + (begin + skipped) * self.step, end - begin))
        return chains

    def _lanes(self, wanted: int) -> list[tuple[int, int]]:
        """Offset and number of positions of as few lanes as hold the wanted ones."""
        usable = self.tokens - self.longest
        for count in range(max(-(-wanted // -(-usable // self.step)), 1), self.step + 1):
            offsets = [lane * self.step // count for lane in range(count)]
            lanes = [(offset, -(-(usable - offset) // self.step)) for offset in offsets if offset < usable]
            if sum(there for _, there in lanes) >= wanted:
                return lanes
        raise AssertionError("every position is in one of `step` lanes")

    def positions(self) -> npt.NDArray[np.int64]:
        """Of the tokens that are predicted, [N], in the order of the chains."""
        return np.concatenate([first + np.arange(count) * self.step for first, count in self.chains()])

    def runs(self) -> Iterator[Run]:
        """All runs, the longest first."""
        found, before = [], 0
        for first, count in self.chains():
            for n in range(1 - self.contexts, count):  # the number of the position before its first step
                begin, end = max(-n, 0), min(count - n, self.contexts)  # contexts it has positions for
                start = first + (n - 1) * self.step
                if end > begin:
                    found.append(Run(start, end * self.step, begin, before + n + begin))
            before += count
        return iter(sorted(found, key=lambda run: (-run.length, run.start)))

    def cost(self, limit: int | None = None) -> int:
        """Tokens to be read for all positions.

        limit: the longest context a model can use; if it is none of the lengths, it has runs of its
        own.
        """
        usable = self.usable(limit)
        runs = sum(min(run.length, usable * self.step) for run in self.runs() if run.first < usable)
        if limit is None or usable == self.contexts or usable * self.step == limit:
            return runs
        return runs + len(self.positions()) * limit

    def usable(self, limit: int | None) -> int:
        """Contexts that are within a limit."""
        return self.contexts if limit is None else min(limit // self.step, self.contexts)
