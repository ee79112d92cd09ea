"""Texts of a corpus, continued: the context, what a model made of it, and what followed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from txl.commands.presets import Settings
from txl.commands.splits import corpus_of
from txl.errors import TxlError
from txl.language_model import LanguageModel
from txl.text.detokenise import detokenise
from txl.text.vocabulary import Tokens
from txl.training.run import read_record

_LINE = 4096  # tokens, more than a paragraph has


@dataclass(frozen=True)
class Sample:
    """One text of three parts.

    Attributes:
        seed: of the start and of the tokens drawn. start: of the context, in the split.
        seconds: of reading the context and generating.
    """

    seed: int
    split: str
    start: int
    context: str
    generation: str
    reference: str
    context_tokens: int
    generated_tokens: int
    reference_tokens: int
    seconds: float

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Headings and texts."""
        return [
            (f"context: {self.context_tokens:,} tokens of {self.split} from {self.start:,}", self.context),
            (f"generation: {self.generated_tokens:,} tokens, seed {self.seed}", self.generation),
            (f"reference: {self.reference_tokens:,} tokens", self.reference),
        ]


class Split(NamedTuple):
    """Tokens of a corpus, and where they are from."""

    corpus: Path
    name: str
    tokens: Tokens


def find_split(saved: LanguageModel, source: Path | None, name: str) -> Split:
    """A split of a prepared corpus, or of the one that the model's run was trained on."""
    if source is None:
        try:
            source = read_record(saved.path.parent).corpus
        except TxlError as error:
            raise TxlError(
                f"--data must name a prepared corpus: the checkpoint is in no run's folder ({error})"
            ) from error
        if not source.is_dir():
            raise TxlError(f"--data must name a prepared corpus: the run's own, {source}, is not there")
    corpus = corpus_of(saved, source)
    tokens = corpus.split(name)
    corpus.verify(name)
    return Split(source, name, tokens)


def draw(
    saved: LanguageModel,
    split: Split,
    context: int,
    settings: Settings,
    seed: int,
    as_text: bool,
    progress: Callable[[int], None],
) -> Sample:
    """A context from a random start, continued.

    The start leaves room for a reference as long as the generation, if the split is that long.

    as_text: detokenised.
    """
    tokens, drawn = split.tokens, 0
    start = int(np.random.default_rng(seed).integers(max(len(tokens) - context - settings.count, 0) + 1))
    before = tokens[start : start + context]

    def count(n: int) -> None:
        nonlocal drawn
        drawn = n
        progress(n)

    began = time.perf_counter()
    pieces = saved.stream(
        before, settings.count, settings.sampling, attn_len=settings.attn_len, clamp_len=settings.clamp_len,
        zeros=settings.zeros, seed=seed, stop=settings.stop, progress=count,
    )  # fmt: skip
    generated = b"".join(pieces)
    seconds = time.perf_counter() - began
    if saved.vocabulary.unit == "words":
        generated = generated.lstrip(b" ")  # what stood between it and the context

    def text(first: int, end: int) -> str:
        return saved.vocabulary.decode(tokens[first:end].tolist()).decode("utf-8", "replace")

    middle, earliest = start + context, max(start - _LINE, 0)
    texts = text(start, middle), generated.decode("utf-8", "replace"), text(middle, middle + drawn)
    if as_text:  # what precedes tells where a quotation is open
        earlier, known = text(earliest, start), text(earliest, middle)
        texts = detokenise(texts[0], earlier), detokenise(texts[1], known), detokenise(texts[2], known)
    return Sample(seed, split.name, start, *texts, len(before), drawn, min(drawn, len(tokens) - middle), seconds)
