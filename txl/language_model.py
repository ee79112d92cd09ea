"""A trained model with its vocabulary: `txl.load`, then evaluate and generate."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl.distributed import World
from txl.errors import TxlError
from txl.evaluation.continuation import GrowingText, by_length, pieces
from txl.evaluation.decoding import generation_engine
from txl.evaluation.evaluate import METHODS, Method, default_method, evaluate
from txl.evaluation.generate import Sampling, generate, starting_with
from txl.evaluation.reader import Reader
from txl.evaluation.score import Score
from txl.evaluation.segments import SegmentReader
from txl.evaluation.stopping import Stop, stop_strings
from txl.evaluation.window import WindowReader
from txl.model import Network
from txl.model.recurrent import RecurrentNetwork
from txl.paths import AnyPath
from txl.text.corpus import as_tensor
from txl.text.streams import Counting
from txl.text.vocabulary import SENTENCE, Tokens, Vocabulary, WordVocabulary
from txl.training import checkpoint as checkpoints


@dataclass(frozen=True)
class LanguageModel:
    """What a checkpoint holds, ready for use.

    Attributes:
        model: in evaluation mode, on its device.
        attn_len: the longest attention of training, the default here. segment: tokens of its
            segments.
        path: the file it was read from.
        digest: SHA-256 of what was read; "" for a model that was not.
    """

    model: Network
    vocabulary: Vocabulary
    attn_len: int
    segment: int
    path: Path
    digest: str = ""

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
        world: World = World(),  # noqa: B008 - frozen
    ) -> Score:
        """Scores a text, or tokens as `Corpus.split` has them.

        Args:
            attn_len: most keys a token sees, itself included; None for `self.attn_len`.
            method: None for cached keys where the model has recurrence and relative positions; else
                see `txl.evaluation.evaluate`.
            segment: tokens a step; None for 128 cached, 1 sliding, training's by segments.
            batch, limit, clamp_len, counting, progress, world: as in `txl.evaluation.evaluate`.

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
        if attn_len is not None and how != "sliding":
            self._refuse_for_recurrent("attn_len", attn_len)
        if segment is None:
            segment = {"cached": 128, "sliding": 1, "segments": self.segment}[how]
        score = evaluate(
            self.model, tokens, self.vocabulary.start, self.attn_len if attn_len is None else attn_len, method=how,
            segment=segment, batch=batch, limit=limit, clamp_len=clamp_len, counting=counting, progress=progress,
            world=world,
        )  # fmt: skip
        if score.tokens != len(tokens):
            return score
        return dataclasses.replace(score, sentences=self._sentences(tokens))

    def generate(
        self,
        prompt: str | bytes | Tokens | None = None,
        count: int = 500,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        *,
        attn_len: int | None = None,
        clamp_len: int | None = None,
        zeros: bool | None = None,
        seed: int | None = None,
        stop: Stop = (),
    ) -> str:
        """The text that continues a prompt; bytes that are no UTF-8 are replaced.

        Args:
            prompt: None for the start of a text; tokens as `Corpus.split` has them.
            count: tokens to generate: bytes, or words.
            attn_len: keys a token sees; None as in training.
            clamp_len: largest distance told apart; None for the model's own.
            zeros: whether zero states precede the prompt, as many as a token sees, and are
                attended; None for the model's own.
            seed: for the same text again; None for another each time.
            stop: a string or several; the text ends before the first of them that it comes to.

        Raises:
            TxlError: the prompt is empty or holds what the vocabulary lacks, an argument does not
                fit the model, or the model's predictions are not finite.
        """
        shown = self.stream(
            prompt, count, sampling, attn_len=attn_len, clamp_len=clamp_len, zeros=zeros, seed=seed, stop=stop
        )
        return b"".join(shown).decode("utf-8", errors="replace")

    def stream(
        self,
        prompt: str | bytes | Tokens | None = None,
        count: int = 500,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        *,
        attn_len: int | None = None,
        clamp_len: int | None = None,
        zeros: bool | None = None,
        seed: int | None = None,
        stop: Stop = (),
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[bytes]:
        """As `generate`, each token's bytes as soon as it is drawn, or as soon as it is known not
        to begin a stop string.

        With relative positions and recurrence memory and time a token are constant however long the
        text gets; otherwise each token reads its window anew.

        progress: called with the number of tokens drawn so far.
        """
        tokens, text = self._begin(prompt, stop_strings(stop))
        drawn = self._drawn(tokens.unsqueeze(0), count, sampling, attn_len, clamp_len, zeros, self._generator(seed))
        return pieces(drawn, text, progress)

    def generate_batch(
        self,
        prompts: Sequence[str | bytes | Tokens],
        count: int = 500,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        *,
        attn_len: int | None = None,
        clamp_len: int | None = None,
        zeros: bool | None = None,
        seed: int | None = None,
        stop: Stop = (),
    ) -> list[str]:
        """The texts that continue several prompts, in their order; arguments and errors as in
        `generate`.

        Prompts of the same number of tokens are continued side by side. Each text ends at a stop
        string of its own. All are drawn with one seed, so a text also depends on the others that
        are drawn with it, unless the temperature is 0.
        """
        if isinstance(prompts, (str, bytes)) or not len(prompts):
            raise TxlError(f"prompts must be a sequence of one prompt or more, got {prompts!r:.40}")
        stops, begun = stop_strings(stop), []
        for n, prompt in enumerate(prompts):
            try:
                begun.append(self._begin(prompt, stops))
            except TxlError as error:
                raise TxlError(f"prompts[{n}]: {error}") from error
        generator = self._generator(seed)

        def draw(block: Tensor) -> Iterator[Tensor]:
            return self._drawn(block, count, sampling, attn_len, clamp_len, zeros, generator)

        texts = by_length([tokens for tokens, _ in begun], [text for _, text in begun], draw)
        return [text.decode("utf-8", errors="replace") for text in texts]

    def _begin(self, prompt: str | bytes | Tokens | None, stops: tuple[bytes, ...]) -> tuple[Tensor, GrowingText]:
        """A prompt's tokens [n], and the text that is to follow them."""
        if prompt is None:
            tokens, apart = torch.tensor([self.vocabulary.start]), True
        elif isinstance(prompt, (str, bytes)):
            tokens, apart = as_tensor(self._encoded(prompt)), _bytes(prompt)[-1:].isspace()
        else:
            tokens, apart = as_tensor(self._checked(prompt, "prompt")), False
        if not len(tokens):
            raise TxlError("the prompt is empty: at least one token is needed to predict the next")
        return tokens, GrowingText(self.vocabulary, int(tokens[-1]), apart, stops)

    def _drawn(
        self,
        prompts: Tensor,
        count: int,
        sampling: Sampling,
        attn_len: int | None,
        clamp_len: int | None,
        zeros: bool | None,
        generator: torch.Generator,
    ) -> Iterator[Tensor]:
        """Tokens [B] after prompts [B, n]."""
        for name, value in (("count", count), ("attn_len", attn_len), ("clamp_len", clamp_len)):
            _positive(name, value)
        batch, length = prompts.shape
        reader = self._reader(attn_len, length + count, batch, clamp_len, zeros)
        return generate(reader, prompts.to(self.model.device), count, sampling, generator)

    def _generator(self, seed: int | None) -> torch.Generator:
        """A generator begun with a seed; None for another each time."""
        generator = torch.Generator(self.model.device)
        generator.manual_seed(seed) if seed is not None else generator.seed()
        return generator

    def _encoded(self, text: str | bytes) -> Tokens:
        return self.vocabulary.encode(_bytes(text))

    def _checked(self, tokens: Tokens, name: str = "text") -> Tokens:
        """Tokens as they are; TxlError for what are none of the vocabulary's."""
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TxlError(f"{name} must be str, bytes, or a NumPy array [n] of tokens, got {type(tokens).__name__}")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(self.vocabulary):
            raise TxlError(
                f"{name} must hold tokens from 0 to {len(self.vocabulary) - 1}, got {tokens.min()} to {tokens.max()}"
            )
        return tokens

    def _reader(
        self, attn_len: int | None, longest: int, batch: int, clamp_len: int | None, zeros: bool | None
    ) -> Reader:
        """Cached; or a window, with absolute positions or without recurrence, by default as long as
        training's segments. An LSTM or QRNN carries its state, whatever attn_len.

        longest: tokens that a text will have.
        """
        for name, value in (("attn_len", attn_len), ("zeros", zeros)):
            if value is not None:
                self._refuse_for_recurrent(name, value)
        model = starting_with(self.model, zeros)
        if isinstance(model, RecurrentNetwork):
            return SegmentReader(model, batch, 1, 128, clamp_len)
        if attn_len is not None and model.config.initial_memory == "empty":  # no token sees more than there is
            attn_len = min(attn_len, longest)
        if default_method(model) == "cached":
            return generation_engine(model, batch, self.attn_len if attn_len is None else attn_len, 128, clamp_len)
        return WindowReader(model, batch, self.segment if attn_len is None else attn_len, 1, clamp_len)

    def _refuse_for_recurrent(self, name: str, value: object) -> None:
        """Raises TxlError if the model is an LSTM or QRNN."""
        if isinstance(self.model, RecurrentNetwork):
            kind = self.model.config.network
            raise TxlError(f"{name} is for Transformers; a network of kind {kind!r} reads all before, got {value!r}")

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
    return LanguageModel(model, saved.vocabulary, saved.attn_len, saved.segment, saved.path, saved.digest)
