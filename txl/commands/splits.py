"""The text that a command reads with a trained model: of a corpus, or a file."""

from pathlib import Path

from txl.errors import TxlError
from txl.language_model import LanguageModel
from txl.text import files
from txl.text import corpus as data
from txl.text.readers import SPLITS
from txl.text.vocabulary import Tokens
from txl.training.run import read_record


def corpus_of(saved: LanguageModel, folder: Path) -> data.Corpus:
    """A prepared corpus; TxlError if its vocabulary is not the model's."""
    corpus = data.load(folder)
    if corpus.vocabulary != saved.vocabulary:
        raise TxlError(f"{folder}: its vocabulary is not the one {saved.path} was trained with")
    return corpus


def split_of(saved: LanguageModel, source: Path | None, split: str) -> Tokens:
    """Tokens of a text.

    source: a corpus, or a file, which is taken whole; None for the run's corpus.
    """
    if split not in SPLITS:
        raise TxlError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    source = source or read_record(saved.path.parent).corpus
    if source.exists() and not source.is_dir():  # a pipe, too
        return saved.vocabulary.encode(files.read(source))
    corpus = corpus_of(saved, source)
    corpus.verify(split)
    return corpus.split(split)
