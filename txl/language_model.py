"""A trained model with its vocabulary: `txl.load`, then evaluate and generate."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.engine import Engine
from txl.evaluation.evaluate import METHODS, Method, default_method, evaluate
from txl.evaluation.generate import Sampling, generate
from txl.evaluation.reader import Reader
from txl.evaluation.score import Score
from txl.evaluation.window import WindowReader
from txl.model.transformer import TransformerXL
from txl.paths import AnyPath
from txl.text.corpus import as_tensor
from txl.text.streams import Counting
from txl.text.vocabulary import Tokens, Vocabulary
from txl.text.words import SENTENCE, WordVocabulary
from txl.training import checkpoint as checkpoints


@dataclass(frozen=True)
class LanguageModel:
    """What a checkpoint holds, ready for use.

    Attributes:
        model: in evaluation mode, on its device.
        attn_len: the longest attention of training, the default here. segment: tokens of its
            segments.
        path: the file it was read from.
    """

    model: TransformerXL
    vocabulary: Vocabulary
    attn_len: int
    segment: int
    path: Path

    def evaluate(
        self,
        text: str | bytes | Tokens,
        attn_len: int | None = None,
        *,
        method: Method | None = None,
        segment: int | None = None,
        batch: int = 8,
        limit: int | None = None,
        clamp_len: int | None = None,
        counting: Counting = "all",
        progress: Callable[[int], None] | None = None,
    ) -> Score:
        """Scores a text, or tokens as `Corpus.split` has them.

        Args:
            attn_len: most keys a token sees, itself included; None for `self.attn_len`.
            method: None for cached keys where the model has recurrence and relative positions; else
                see `txl.evaluation.evaluate`.
            segment: tokens a step; None for 128 cached, 1 sliding, training's by segments.
            batch, limit, clamp_len, counting, progress: as in `txl.evaluation.evaluate`.

        Raises:
            TxlError: the text is empty or holds what the vocabulary lacks, or an argument does not
                fit the model.
        """
        for name, value in (("attn_len", attn_len), ("segment", segment), ("batch", batch), ("limit", limit)):
            _positive(name, value)
        tokens = self._encoded(text) if isinstance(text, (str, bytes)) else self._checked(text)
        how = default_method(self.model) if method is None else method
        if how not in METHODS:
            raise TxlError(f"method must be one of {', '.join(METHODS)}, got {how!r}")
        if segment is None:
            segment = {"cached": 128, "sliding": 1, "segments": self.segment}[how]
        score = evaluate(
            self.model, tokens, self.vocabulary.start, self.attn_len if attn_len is None else attn_len, method=how,
            segment=segment, batch=batch, limit=limit, clamp_len=clamp_len, counting=counting, progress=progress,
        )  # fmt: skip
        if score.tokens != len(tokens):
            return score
        words = self.vocabulary.count_words(_bytes(text)) if isinstance(text, (str, bytes)) else None
        return dataclasses.replace(score, words=words, sentences=self._sentences(tokens))

    def generate(
        self,
        prompt: str | bytes | None = None,
        count: int = 500,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        *,
        attn_len: int | None = None,
        seed: int | None = None,
    ) -> str:
        """The text that continues a prompt; bytes that are no UTF-8 are replaced.

        Args:
            prompt: None for the start of a text.
            count: tokens to generate: bytes, or words.
            attn_len: keys a token sees; None as in training.
            seed: for the same text again; None for another each time.

        Raises:
            TxlError: the prompt is empty or holds what the vocabulary lacks, or the model's
                predictions are not finite.
        """
        pieces = self.stream(prompt, count, sampling, attn_len=attn_len, seed=seed)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def stream(
        self,
        prompt: str | bytes | None = None,
        count: int = 500,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        *,
        attn_len: int | None = None,
        seed: int | None = None,
    ) -> Iterator[bytes]:
        """As `generate`, each token's bytes as soon as it is drawn.

        With relative positions and recurrence memory and time a token are constant however long the
        text gets; otherwise each token reads its window anew.
        """
        for name, value in (("count", count), ("attn_len", attn_len)):
            _positive(name, value)
        vocabulary, text = self.vocabulary, b"" if prompt is None else _bytes(prompt)
        known = torch.tensor([vocabulary.start]) if prompt is None else as_tensor(self._encoded(text))
        tokens = known.unsqueeze(0).to(self.model.device)
        generator = torch.Generator(self.model.device)
        generator.manual_seed(seed) if seed is not None else generator.seed()
        if attn_len is not None:  # no token sees more than there is
            attn_len = min(attn_len, tokens.size(1) + count)
        drawn = generate(self._reader(attn_len), tokens, count, sampling, generator)
        apart = vocabulary.unit == "words" and (not text or text[-1:].isspace())  # no space is wanted before it
        return self._shown(drawn, int(tokens[0, -1]) if tokens.size(1) else 0, apart)  # an empty prompt is refused

    def _shown(self, drawn: Iterator[Tensor], before: int, apart: bool) -> Iterator[bytes]:
        """The bytes that each token adds to a text whose last token is `before`."""
        for n, token in enumerate(map(int, drawn)):
            shown = self.vocabulary.decode([before, token])[len(self.vocabulary.decode([before])) :]
            yield shown.lstrip(b" ") if n == 0 and apart else shown
            before = token

    def _encoded(self, text: str | bytes) -> Tokens:
        return self.vocabulary.encode(_bytes(text))

    def _checked(self, tokens: Tokens) -> Tokens:
        """Tokens as they are; TxlError for what are none of the vocabulary's."""
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TxlError(f"text must be str, bytes, or a NumPy array [n] of tokens, got {type(tokens).__name__}")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(self.vocabulary):
            raise TxlError(
                f"text must hold tokens from 0 to {len(self.vocabulary) - 1}, got {tokens.min()} to {tokens.max()}"
            )
        return tokens

    def _reader(self, attn_len: int | None) -> Reader:
        """Cached; or a window, with absolute positions or without recurrence, by default as long as
        training's segments."""
        if default_method(self.model) == "cached":
            return Engine(self.model, 1, self.attn_len if attn_len is None else attn_len, 128)
        return WindowReader(self.model, 1, self.segment if attn_len is None else attn_len)

    def _sentences(self, tokens: Tokens) -> int | None:
        """Of One Billion Word and its like, whose sentences `<S>` bounds."""
        if not isinstance(self.vocabulary, WordVocabulary) or SENTENCE not in self.vocabulary.words:
            return None
        return int((tokens == self.vocabulary.start).sum())


def _bytes(text: str | bytes) -> bytes:
    try:
        return text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise TxlError(f"the text cannot be encoded: {error}") from error


def _positive(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise TxlError(f"{name} must be an integer >= 1, got {value!r}")


def load(path: AnyPath, device: torch.device | str = "cpu") -> LanguageModel:
    """Opens a trained model.

    Args:
        path: a run's folder, whose best checkpoint is taken, or a .safetensors file.

    Raises:
        TxlError: there is none, or it is damaged.
    """
    model, saved = checkpoints.restore(path, device)
    return LanguageModel(model, saved.vocabulary, saved.attn_len, saved.segment, saved.path)
