"""Vocabularies of the original code and of transformers' tokenizer, stored as pickles."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl.errors import TxlError
from txl.importing import pickles
from txl.importing.pickles import Inert
from txl.paths import read_text
from txl.text.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary, decoded_again, first_words

FILES = ("vocab.pkl", "vocab.bin", "vocab.txt", "cache.pt", "cache.pkl")
SETTINGS = "txl_vocabulary"  # a field that txl adds to config.json
MAX_BYTES = 2**30
_NONE: Mapping[str, Any] = {}


def beside(path: Path) -> Path | None:
    """Return the vocabulary file in a folder, or in a file's folder; None if there is none."""
    folder = path if path.is_dir() else path.parent
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def read(path: Path) -> Vocabulary:
    """Read a vocabulary file, one of `FILES`: a pickle, a torch.save file, or a text with one word
    a line.

    If all words are numbers of bytes, as in the original preparation of enwik8, a byte vocabulary
    is returned. Words whose UTF-8 was read as Latin-1, as in transformers' WikiText-103 vocabulary,
    are repaired by `decoded_again`, but not those in txl's own export.

    Raises:
        TxlError: it is damaged or of another form; the message names the file.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TxlError(f"{path.stat().st_size:,} bytes are too many for a vocabulary")
        if path.suffix == ".txt":
            listed, settings = first_words(path.read_bytes()), _settings(path)
            return _of_words(listed, settings.get("lower") is True, settings, again=not settings)
        return of(pickles.load(path))
    except (TxlError, OSError) as error:
        raise TxlError(f"{path}: {error}") from error


def _settings(path: Path) -> dict[str, Any]:
    """Read the settings that txl's export stores in config.json for the word list in the same
    folder."""
    try:
        found = json.loads(read_text(path.parent / "config.json"))[SETTINGS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def of(found: Any) -> Vocabulary:
    """Make the vocabulary from an unpickled object, a vocabulary or a corpus that has one; errors
    as in `read`."""
    for _ in range(2):
        fields = found.state if isinstance(found, Inert) else found
        if not isinstance(fields, dict):
            break
        if isinstance(words := fields.get("idx2sym"), list):
            return _of_words(words, fields.get("lower_case") is True, again=True)
        found = fields.get("vocab")
    raise TxlError("holds no vocabulary (idx2sym)")


def _of_words(words: list[Any], lower: bool, settings: Mapping[str, Any] = _NONE, *, again: bool) -> Vocabulary:
    """again: whether words may be UTF-8 that was read as Latin-1."""
    if not words or not all(isinstance(x, str) and x.encode("utf-8", "ignore").decode() == x for x in words):
        raise TxlError("holds no words, or some that are no text")
    numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) <= 3]
    if len(numbers) == len(words) and len(set(numbers)) == len(numbers) and max(numbers) < 256:
        dropped = settings.get("dropped", [])
        known = isinstance(dropped, list) and all(type(x) is int and 0 <= x < 256 for x in dropped)
        return ByteVocabulary(bytes(numbers), bytes(dropped) if known else b"")
    return WordVocabulary(decoded_again(words) if again else words, lower, str(settings.get("end", "")))
