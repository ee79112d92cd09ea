"""Byte-level corpora on disk, memory-mapped, and the ordered streams that make memory work."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txl.errors import TxlError
from txl.paths import AnyPath
from txl.text import sources

Tokens = npt.NDArray[np.uint8]

_META = "corpus.json"
_SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Vocabulary:
    """The bytes a corpus uses, in order; token n stands for byte symbols[n]."""

    symbols: bytes

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def start(self) -> int:
        """The token taken to precede a text: newline, or the first symbol."""
        return max(self.symbols.find(b"\n"), 0)

    def encode(self, text: bytes) -> Tokens:
        """Tokens, uint8.

        Raises:
            TxlError: the text holds bytes the vocabulary lacks, which it lists.
        """
        unknown = sorted(set(text.translate(None, delete=self.symbols)))
        if unknown:
            names = ", ".join(f"0x{b:02x} {chr(b)!r}" if b < 128 else f"0x{b:02x}" for b in unknown)
            raise TxlError(f"the text holds bytes that the training data never did: {names}")
        table = bytes.maketrans(self.symbols, bytes(range(len(self.symbols))))
        # Not table[text], which takes indices of 8 bytes.
        return np.frombuffer(text.translate(table), dtype=np.uint8)

    def decode(self, tokens: list[int]) -> bytes:
        return bytes(self.symbols[t] for t in tokens)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: three memory-mapped uint8 token arrays and their vocabulary."""

    folder: Path
    vocabulary: Vocabulary
    train: Tokens
    valid: Tokens
    test: Tokens
    source: str
    fingerprint: str  # SHA-256 of the three splits

    def split(self, name: str) -> Tokens:
        if name not in _SPLITS:
            raise TxlError(f"split must be one of {', '.join(_SPLITS)}, got {name!r}")
        tokens: Tokens = getattr(self, name)
        return tokens


def prepare(source: AnyPath | None, folder: AnyPath) -> Corpus:
    """Writes a corpus to `folder` and opens it; its vocabulary is every byte the source holds.

    source: as in `sources.read`.
    """
    splits = sources.read(source)
    folder = Path(folder)
    vocabulary = Vocabulary(bytes(b for b in range(256) if any(b in text for text in splits[:3])))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _META).unlink(missing_ok=True)  # written last: a folder that has it is whole
    fingerprint = hashlib.sha256()
    for name, text in zip(_SPLITS, splits[:3], strict=True):
        tokens = vocabulary.encode(text).data
        fingerprint.update(tokens)
        fresh = folder / f".{name}.bin.tmp"
        fresh.write_bytes(tokens)
        fresh.replace(folder / f"{name}.bin")  # whoever has the old one mapped keeps it
    meta = {"symbols": list(vocabulary.symbols), "source": splits.source}
    meta["fingerprint"] = fingerprint.hexdigest()
    (folder / _META).write_text(json.dumps(meta), encoding="utf-8")
    return load(folder)


def open_corpus(source: AnyPath | None, folder: AnyPath) -> Corpus:
    """A prepared corpus as it is; anything else is prepared in `folder` first."""
    if source is not None and Path(source, _META).is_file():
        return load(source)
    return prepare(source, folder)


def load(folder: AnyPath) -> Corpus:
    """Opens a prepared corpus.

    Raises:
        TxlError: the folder holds none, or it is damaged.
    """
    folder = Path(folder)
    meta_path = folder / _META
    if not meta_path.is_file():
        raise TxlError(f"{folder}: not a prepared corpus ({_META} is missing); run `txl prepare` first")
    try:
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        vocabulary = Vocabulary(bytes(meta["symbols"]))
        train, valid, test = (np.memmap(folder / f"{name}.bin", dtype=np.uint8, mode="r") for name in _SPLITS)
        return Corpus(folder, vocabulary, train, valid, test, str(meta["source"]), str(meta["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TxlError(f"{folder}: the prepared corpus is damaged ({error}); run `txl prepare` again") from error


def as_tensor(tokens: Tokens) -> Tensor:
    """int64 copy."""
    return torch.from_numpy(np.asarray(tokens).astype(np.int64))


class OrderedStreams:
    """A split cut into `batch` contiguous streams, read by segments so that memory carries over.

    `segment(n)` is a pure function of n, so a run resumes anywhere.
    """

    def __init__(self, tokens: Tokens, batch: int, length: int) -> None:
        """Raises TxlError if a stream would be shorter than one segment and its targets."""
        self.tokens, self.batch, self.length = tokens, batch, length
        self.stream_len = (len(tokens) - 1) // batch
        self.segments = self.stream_len // length
        if self.segments < 1:
            raise TxlError(
                f"the training split has {len(tokens)} tokens; {batch} streams of one segment of {length} need at least "
                f"{batch * length + 1}: use a longer text, a smaller batch or a shorter segment"
            )

    def starts_epoch(self, n: int) -> bool:
        """Whether segment n begins the text again, so that memory must be emptied."""
        return n % self.segments == 0

    def segment(self, n: int) -> tuple[Tensor, Tensor]:
        """Tokens and their successors, int64 [batch, length] each."""
        first = n % self.segments * self.length
        rows = [self.tokens[b * self.stream_len + first :][: self.length + 1] for b in range(self.batch)]
        block = as_tensor(np.stack(rows))
        return block[:, :-1], block[:, 1:]


def scored_segments(
    tokens: Tokens, start: int, batch: int, length: int, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Segments (inputs, targets) that score every token of a split exactly once.

    The split is cut into `batch` streams; each token's input is its predecessor, `start` for the
    very first. Targets are -100 (ignored) where a shorter stream has ended.

    limit: only the first so many tokens.
    """
    tokens = tokens[:limit]
    batch = min(batch, len(tokens))
    per_stream = -(-len(tokens) // batch)
    padded = np.full(batch * per_stream, -100, dtype=np.int64)
    padded[: len(tokens)] = tokens
    targets = torch.from_numpy(padded.reshape(batch, per_stream))
    before = np.concatenate([[start], padded[:-1]])
    inputs = torch.from_numpy(np.where(before < 0, start, before).reshape(batch, per_stream))
    for first in range(0, per_stream, length):
        yield inputs[:, first : first + length], targets[:, first : first + length]
