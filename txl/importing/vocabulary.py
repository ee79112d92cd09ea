"""Vocabularies of the original code and of Hugging Face's tokenizer, kept as pickles."""

import zipfile
from pathlib import Path
from typing import Any

import torch

from txl.errors import TxlError
from txl.importing.inert import Inert, unpickle
from txl.text.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary, first_words

MOST_BYTES = 2**30


def read(path: Path) -> Vocabulary:
    """Of vocab.pkl, vocab.bin or cache.pkl, or a text file with a word a line.

    Words that are all numbers of bytes, as the original prepares enwik8, are the bytes themselves.

    Raises:
        TxlError: it is damaged or of another form; names the file.
    """
    if path.stat().st_size > MOST_BYTES:
        raise TxlError(f"{path}: {path.stat().st_size:,} bytes are too many for a vocabulary")
    if path.suffix == ".txt":
        return _of_words(first_words(path.read_bytes()), False, path)
    if zipfile.is_zipfile(path):  # torch.save's
        try:
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # what a damaged file raises is anything
            raise TxlError(f"{path}: not a file of plain data ({type(error).__name__})") from error
    else:
        found = unpickle(path.read_bytes(), str(path))
    fields = _fields(found, path)
    words = fields.get("idx2sym")
    if not isinstance(words, list) or not words:
        raise TxlError(f"{path}: holds no list of words (idx2sym)")
    return _of_words([_text(word, path) for word in words], fields.get("lower_case") is True, path)


def _fields(found: Any, path: Path) -> dict[str, Any]:
    """Attributes of the vocabulary, which may be one of a corpus."""
    for _ in range(2):
        state = found.state if isinstance(found, Inert) else found
        if not isinstance(state, dict):
            break
        named = {_text(key, path): value for key, value in state.items() if isinstance(key, (str, bytes))}
        if "idx2sym" in named:
            return named
        found = named.get("vocab")
    raise TxlError(f"{path}: holds no vocabulary (idx2sym)")


def _text(word: Any, path: Path) -> str:
    """Of Python 3 a str, of Python 2 the bytes of its UTF-8."""
    if isinstance(word, str):
        return word
    if not isinstance(word, bytes):
        raise TxlError(f"{path}: a vocabulary of words holds {type(word).__name__}")
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TxlError(f"{path}: the word {word!r} is not UTF-8") from error


def _of_words(words: list[str], lower: bool, path: Path) -> Vocabulary:
    numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) <= 3]
    if len(numbers) == len(words) and len(set(numbers)) == len(numbers) and max(numbers) < 256:
        return ByteVocabulary(bytes(numbers))
    try:
        return WordVocabulary(words, lower=lower)
    except TxlError as error:
        raise TxlError(f"{path}: {error}") from error
