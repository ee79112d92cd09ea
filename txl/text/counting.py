"""The first reading of a source: the bytes or words it uses, and so its vocabulary."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from txl.errors import TxlError
from txl.text.cutting import Pieces
from txl.text.pieces import Watch
from txl.text.readers import SPLITS, Reader
from txl.text.rules import PrepareOptions, Rule
from txl.text.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary, first_words
from txl.text.words import lacking, words_of

LONGEST_WORD = 1 << 20  # bytes; more is no text of words, and would not fit the memory promised


def make_vocabulary(reader: Reader, rule: Rule, options: PrepareOptions, watch: Watch) -> Vocabulary:
    """The vocabulary of a source, from the file given or from one reading.

    Raises:
        TxlError: the source is no such text, or the file is damaged or lacks words.
    """
    if rule.unit == "bytes":
        used: set[int] = set()
        for _, piece in reader.pieces(watch):
            used.update(piece.translate(None, delete=bytes(used)))
        dropped = b"\n" if options.newline == "drop" else b""
        return ByteVocabulary(bytes(sorted(used - set(dropped))), dropped)
    lower = rule.lower or bool(options.lower)
    given = options.vocabulary and read_words(options.vocabulary, lower=lower, end=rule.end)
    if given and given.unknown is not None:
        return given
    counts = _count(reader, lower, rule.end, watch)
    vocabulary = given or _counted(counts, rule, options, lower)
    missing = [] if vocabulary.unknown is not None else vocabulary.missing(word for split in counts for word in split)
    if missing:
        raise TxlError(f"{reader.description}: {lacking(missing)}")
    return vocabulary


def read_words(path: Path, *, lower: bool, end: str) -> WordVocabulary:
    """A user's vocabulary file: the first word of each line, in its order."""
    try:
        return WordVocabulary(first_words(Path(path).read_bytes()), lower=lower, end=end)
    except OSError as error:
        raise TxlError(f"{path}: cannot be read: {error.strerror}") from error
    except TxlError as error:
        raise TxlError(f"{path}: {error}") from error


def whole_words(pieces: Pieces, source: str) -> Iterator[tuple[int, str]]:
    """Text cut at white space. Each split's last piece must end with a line end.

    Raises:
        TxlError: it is not UTF-8, or a word is longer than LONGEST_WORD.
    """
    carry, at = b"", [0, 0, 0]
    for split, piece in pieces:
        piece = carry + piece
        cut = max(piece.rfind(space) for space in (b" ", b"\n", b"\t")) + 1
        carry = piece[cut:]
        if len(carry) > LONGEST_WORD:
            raise TxlError(f"{source}: a word of more than {LONGEST_WORD:,} bytes; this is no text of words")
        try:
            yield split, piece[:cut].decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"byte {at[split] + error.start:,} of {SPLITS[split]}"
            raise TxlError(f"{source}: is not UTF-8 ({where}), which words need; bytes do not") from error
        at[split] += cut


def _count(reader: Reader, lower: bool, end: str, watch: Watch) -> list[Counter[str]]:
    """Of each split, in order of first appearance: the order of ties."""
    counts: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for split, text in whole_words(reader.pieces(watch), reader.description):
        counts[split].update(words_of(text, lower, end))
    return counts


def _counted(counts: list[Counter[str]], rule: Rule, options: PrepareOptions, lower: bool) -> WordVocabulary:
    """The word that ends a line, then by falling count; ties by first appearance."""
    total: Counter[str] = Counter()
    for split in rule.counted:
        total.update(counts[split])
    del total[rule.end]
    words = [(word, count) for word, count in total.most_common() if word != rule.unknown]
    least = max(rule.min_count, options.min_count)
    kept = [(word, count) for word, count in words[: options.max_words] if count >= least]
    if rule.unknown is not None:
        known = {word for word, _ in kept} | {rule.end}
        if rule.always_unknown or any(word not in known for split in counts for word in split):
            dropped = sum(count for _, count in words) - sum(count for _, count in kept)
            kept.append((rule.unknown, total[rule.unknown] + dropped))
            kept.sort(key=lambda item: -item[1])
    return WordVocabulary([rule.end, *(word for word, _ in kept)], lower=lower, end=rule.end)
