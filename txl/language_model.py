"""A trained model with its vocabulary: `txl.load`, then evaluate and generate."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.evaluate import (
    Reading,
    ResolvedReading,
    Score,
    bounded,
    check_positive,
    default_method,
    evaluate,
    make_reader,
    resolve,
)
from txl.evaluation.generate import Sampling, encoded, generate, text_of
from txl.evaluation.readers import Engine
from txl.model import Network, as_transformer
from txl.model.transformer import TransformerXL
from txl.paths import AnyPath
from txl.text.corpus import as_tensor
from txl.text.streams import Counting
from txl.text.vocabulary import SENTENCE, Tokens, Vocabulary, WordVocabulary
from txl.training import checkpoint as checkpoints

Prompt = str | bytes | Tokens | None  # None: the start of a text; an array: tokens, as in the splits of a `Corpus`


@dataclass(frozen=True)
class LanguageModel:
    """A trained model with its vocabulary, as stored in a checkpoint.

    Attributes:
        model: in evaluation mode, on its device.
        attn_len: the longest attention length used in training, the default here. segment: tokens
            of a training segment.
        path: the file that it was read from.
        digest: SHA-256 of that file; "" if there is none.
    """

    model: Network
    vocabulary: Vocabulary
    attn_len: int
    segment: int
    path: Path
    digest: str = ""
    # The engine of the last generation and what it was made for, or nothing while it is in use.
    _kept: list[tuple[tuple[Any, ...], Engine]] = field(default_factory=list, init=False, repr=False, compare=False)

    def evaluate(
        self,
        text: str | bytes | Tokens,
        reading: Reading | ResolvedReading | int | None = None,
        *,
        batch: int = 8,
        limit: int | None = None,
        counting: Counting = "all",
        progress: Callable[[int], None] | None = None,
    ) -> Score:
        """Compute the loss of a text, or of an array of tokens as in the splits of a `Corpus`.

        Args:
            reading: how the text is read; an integer is its attn_len. Defaults as in `resolve`.
            batch, limit, counting, progress: as in `txl.evaluation.evaluate`.

        Raises:
            TxlError: the text is empty or holds a symbol that is not in the vocabulary, an argument
                does not fit the model, or the loss is not finite.
        """
        for name, value in (("batch", batch), ("limit", limit)):
            check_positive(name, value)
        whole = reading if isinstance(reading, ResolvedReading) else self.resolve(reading, batch)
        tokens = self._encoded(text) if isinstance(text, (str, bytes)) else self._checked(text)
        # One Billion Word consists of independent sentences delimited by `<S>`.
        sentences = isinstance(self.vocabulary, WordVocabulary) and self.vocabulary.end == SENTENCE
        return evaluate(
            self.model, tokens, self.vocabulary.start, whole, batch=batch, limit=limit, counting=counting,
            sentences=sentences, progress=progress,
        )  # fmt: skip

    def resolve(self, reading: Reading | int | None = None, batch: int = 1) -> ResolvedReading:
        """Return the reading that `evaluate` uses, with defaults filled in: attn_len is
        `self.attn_len`; the method is "cached" if the model has recurrence and relative positions,
        else see `default_method`; segment is 1 for "sliding", training's for "segments", and for
        "cached" 512 or less, so that a batch of so many texts takes at most 1 GiB.

        Raises:
            TxlError: attn_len is given for an LSTM or QRNN.
        """
        asked = _reading(reading)
        whole = resolve(asked, self.model, self.attn_len, self.segment, batch)
        if asked.attn_len is not None and whole.method != "sliding":
            as_transformer(self.model, "attn_len")
        return whole

    def generate(
        self,
        prompt: Prompt = None,
        count: int = 500,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        reading: Reading | int | None = None,
        *,
        seed: int | None = None,
        stop: str | bytes | None = None,
    ) -> str:
        """Generate a continuation of a prompt. Invalid UTF-8 in it is replaced.

        Args:
            prompt: None for the start of a text; an array holds tokens, as in the splits of a
                `Corpus`.
            count: number of tokens to generate (bytes or words).
            reading: how the text is read; an integer is its attn_len. Defaults as in training,
                except that a model with absolute positions or without recurrence reads a sliding
                window (by default of a training segment's length) anew for each token.
            seed: a seed for a reproducible text; None for a different one each time.
            stop: a string that ends the text and is left out; None to end only after `count`
                tokens.

        Raises:
            TxlError: the prompt is empty or holds a symbol that is not in the vocabulary, an
                argument does not fit the model, or the model's predictions are not finite.
        """
        shown = self.stream(prompt, count, sampling, reading, seed=seed, stop=stop)
        return b"".join(shown).decode("utf-8", errors="replace")

    def stream(
        self,
        prompt: Prompt = None,
        count: int = 500,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        reading: Reading | int | None = None,
        *,
        seed: int | None = None,
        stop: str | bytes | None = None,
    ) -> Iterator[bytes]:
        """Generate as `generate` does, but yield the bytes of each token as soon as it is drawn,
        or, for bytes that may begin the stop string, as soon as they turn out not to.

        Memory and time per token do not depend on the length of the text if the model has relative
        positions and recurrence; otherwise each token reads its window anew.
        """
        tokens, apart = self._begin(prompt)
        check_positive("count", count)
        if stop is not None and not (isinstance(stop, (str, bytes)) and stop):
            raise TxlError(f"stop must be a string of at least one character, got {stop!r}")
        whole = self._bounded(_reading(reading), len(tokens) + count)
        generator = torch.Generator(self.model.device)
        generator.manual_seed(seed) if seed is not None else generator.seed()
        kind = self._kind(whole)
        reader = self._taken(kind) or make_reader(self.model, 1, whole)

        drawn = generate(reader, tokens.unsqueeze(0).to(self.model.device), count, sampling, generator)

        def text() -> Iterator[bytes]:
            try:
                yield from text_of(drawn, self.vocabulary, int(tokens[-1]), apart, encoded(stop or ""))
            finally:
                if isinstance(reader, Engine):
                    self._kept[:] = [(kind, reader)]

        return text()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": []}  # copies and pickles have no engine: CUDA graphs cannot be copied

    def _kind(self, reading: ResolvedReading) -> tuple[Any, ...]:
        """Return what an engine that is used again must have been made for."""
        dtype = next(self.model.parameters()).dtype
        return reading, self.model.device, dtype, *(block.attention for block in getattr(self.model, "layers", ()))

    def _taken(self, kind: tuple[Any, ...]) -> Engine | None:
        """Return the engine that is kept, whose CUDA graphs are captured already, if it is of a
        kind, and keep none."""
        try:
            known, engine = self._kept.pop()  # one step, for threads
        except IndexError:
            return None
        if known != kind:
            return None
        self.model.eval()
        return engine

    def _begin(self, prompt: Prompt) -> tuple[Tensor, bool]:
        """Return a prompt's tokens, int64 [n], and whether the prompt ends in white space."""
        if prompt is None:
            tokens, apart = torch.tensor([self.vocabulary.start], device="cpu"), True
        elif isinstance(prompt, (str, bytes)):
            tokens, apart = as_tensor(self._encoded(prompt)), encoded(prompt)[-1:].isspace()
        else:
            tokens, apart = as_tensor(self._checked(prompt, "prompt")), False
        if not len(tokens):
            raise TxlError("the prompt is empty: at least one token is needed to predict the next")
        return tokens, apart

    def _encoded(self, text: str | bytes) -> Tokens:
        return self.vocabulary.encode(encoded(text))

    def _checked(self, tokens: Tokens, name: str = "text") -> Tokens:
        """Return `tokens`; raise TxlError if they are not an integer array [n] of the vocabulary's
        range."""
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TxlError(f"{name} must be str, bytes, or a NumPy array [n] of tokens, got {type(tokens).__name__}")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(self.vocabulary):
            raise TxlError(
                f"{name} must hold tokens from 0 to {len(self.vocabulary) - 1}, got {tokens.min()} to {tokens.max()}"
            )
        return tokens

    def _bounded(self, asked: Reading, longest: int) -> ResolvedReading:
        """Return the reading for a generation of `longest` tokens: "cached", or "sliding" for a
        model with absolute positions or without recurrence. An LSTM or QRNN carries its state,
        whatever attn_len."""
        if not asked.method and default_method(self.model) == "segments" and isinstance(self.model, TransformerXL):
            asked = dataclasses.replace(asked, method="sliding")
        whole = self.resolve(asked)
        if not asked.attn_len and whole.method == "sliding":
            whole = whole._replace(attn_len=self.segment)
        return bounded(whole, self.model, longest)


def _reading(asked: Reading | int | None) -> Reading:
    return asked if isinstance(asked, Reading) else Reading(asked)


def load(
    path: AnyPath, device: torch.device | str = "cpu", *, clamp_len: int | None = None, zeros: bool | None = None
) -> LanguageModel:
    """Load a trained model from a checkpoint.

    Args:
        path: a run's folder, whose best checkpoint is loaded, or a .safetensors file.
        clamp_len: distances above it are encoded as clamp_len; None for the model's own.
        zeros: whether a text begins with zero states that are attended to, as many as a token can
            see; None for the model's own `initial_memory`.

    Raises:
        TxlError: there is no checkpoint, it is damaged, or the model cannot be read so.
    """
    changes = {"clamp_len": clamp_len, "initial_memory": None if zeros is None else "zeros" if zeros else "empty"}
    model, saved = checkpoints.restore(path, device, **{name: x for name, x in changes.items() if x is not None})
    return LanguageModel(model, saved.vocabulary, saved.attn_len, saved.segment, saved.path, saved.digest)
