"""A prompt that a model can read: the beginning of a line of its own text."""

from txl.errors import TxlError
from txl.text.corpus import Corpus

_LOOKED_AT, _SHORTEST, _LONGEST = 20_000, 8, 24


def prompt_of(corpus: Corpus) -> str | None:
    """Whole words of a line of the test split, or what fits of one; None where no line will do."""
    tokens = [int(token) for token in corpus.test[:_LOOKED_AT]]
    text = corpus.vocabulary.decode(tokens).decode("utf-8", "replace")
    for line in text.splitlines()[1:]:  # the first may begin within a character or a word
        prompt = _beginning(line.strip())
        if len(prompt) >= _SHORTEST and prompt[0].isalnum() and prompt.isprintable() and _known(corpus, prompt):
            return prompt
    return None


def _beginning(line: str) -> str:
    if len(line) <= _LONGEST:
        return line
    cut = line.rfind(" ", _SHORTEST, _LONGEST + 1)
    return line[: cut if cut > 0 else _LONGEST]


def _known(corpus: Corpus, prompt: str) -> bool:
    """Not so of the mark that stands for bytes that are not UTF-8, unless the text has that."""
    try:
        corpus.vocabulary.encode(prompt.encode())
    except TxlError:
        return False
    return True
