"""The corpus of a sweep: prepared once, the same each time it is started."""

import shutil
from pathlib import Path

from txl.errors import TxlError
from txl.sweeps.ledger import Ledger
from txl.text import corpus as data
from txl.text.corpus import Corpus
from txl.text.datasets import PrepareOptions
from txl.text.preparing import META


def open_text(folder: Path, source: Path | None, options: PrepareOptions, ledger: Ledger | None) -> Corpus:
    """A prepared corpus as it is; a raw text prepared in the folder, and when it is given again
    compared with that.

    source: None for the sweep's own, or for the standard library where it begins.

    Raises:
        TxlError: the text is another than the sweep's, whose corpus is left as it was.
    """
    if ledger is None:
        return data.open_corpus(source, folder / "corpus", options)
    kept = data.load(ledger.corpus)
    if source is None:
        return kept
    again = folder / ".corpus-again"
    try:
        given = data.open_corpus(source, again, options)
        ledger.refuse_others({"corpus": given.fingerprint})
        return given if (source / META).is_file() else kept
    finally:
        shutil.rmtree(again, ignore_errors=True)


def other_data(rule: str, size: int, corpus: Corpus) -> str | None:
    """What to say where the corpus is not what the paper's figures are of."""
    if corpus.rule == rule and len(corpus.vocabulary) == size:
        return None
    return (
        f"the paper's figures are of {rule} with {size:,} symbols; this corpus is {corpus.rule} with "
        f"{len(corpus.vocabulary):,}, so they do not apply"
    )


def refuse_no_text(source: Path | None, ledger: Ledger | None, options: PrepareOptions) -> None:
    """Raises TxlError where a data set's own rule would be put to the standard library."""
    if source is None and ledger is None and options.rule != "words":
        raise TxlError(
            f"--data must be given at --scale paper: a prepared corpus, or the files of {options.rule}; got none"
        )
