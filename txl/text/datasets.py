"""Rules, one for each data set: how the source is split and how it becomes tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

from txl.errors import TxlError
from txl.text import readers
from txl.text.files import some
from txl.text.readers import CutFile, Layout, Reader, Source
from txl.text.vocabulary import LINE_END, SENTENCE, Unit

STANDARD_BYTES = 100_000_000  # size of enwik8 and of text8


@dataclass(frozen=True)
class PrepareOptions:
    """Options of preparing a corpus.

    Attributes:
        rule: a name in RULES, or "auto".
        newline: for enwik8: "keep" models newlines (205 symbols); "drop" leaves them out, as the
            original preparation does (204 symbols).
        lower: convert words to lower case; None for the rule's default.
        min_count: words that occur less often in train become `<unk>`.
        max_words: maximum number of words besides `<eos>` and `<unk>`; the rest become `<unk>`.
        vocabulary: a file of words, one a line, in the order of their tokens.
    """

    rule: str = "auto"
    newline: str = "keep"
    lower: bool | None = None
    min_count: int = 1
    max_words: int | None = None
    vocabulary: Path | None = None

    def __post_init__(self) -> None:
        if self.rule not in ("auto", *RULES):
            raise TxlError(f"rule must be one of auto, {', '.join(RULES)}, got {self.rule!r}")
        if self.newline not in ("keep", "drop"):
            raise TxlError(f"newline must be keep or drop, got {self.newline!r}")
        for name in ("min_count", "max_words"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TxlError(f"{name} must be >= 1, got {value}")
        if self.vocabulary is not None and (self.min_count > 1 or self.max_words is not None):
            raise TxlError("vocabulary gives the words; leave min_count and max_words out")


@dataclass(frozen=True)
class Rule:
    """The preparation of a data set.

    Attributes:
        takes: names of the fields of PrepareOptions that apply to it.
        read: makes a reader of the source's splits.
        lower: convert words to lower case.
        end, unknown: the word that ends a line, and the word for words not in the vocabulary.
        always_unknown: whether the unknown word is added even if no word of the text needs it.
        counted: the splits whose words make the vocabulary.
        min_count: words that occur less often become unknown.
        shuffled: whether the training split consists of sentences to be shuffled.
        counts: published sizes, by "vocabulary", "train", "valid" and "test" (the latter in
            tokens).
    """

    name: str
    unit: Unit
    read: Callable[[Source], Reader]
    takes: tuple[str, ...] = ()
    lower: bool = False
    end: str = LINE_END
    unknown: str | None = None
    always_unknown: bool = False
    counted: tuple[int, ...] = (0,)
    min_count: int = 1
    shuffled: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def check(self, options: PrepareOptions) -> None:
        """Raise TxlError if an option is given that does not apply to the rule."""
        for option in fields(PrepareOptions):
            if option.name in ("rule", *self.takes) or getattr(options, option.name) == option.default:
                continue
            takers = ", ".join(rule.name for rule in RULES.values() if option.name in rule.takes)
            raise TxlError(f"{option.name} is no option of the rule {self.name}; it is one of {takers}")

    def published(self, options: PrepareOptions) -> dict[str, int]:
        """Return the sizes published for the data set when prepared with these options."""
        return {"vocabulary": 204} if options.newline == "drop" else self.counts


def _standard(name: str) -> Callable[[Source], Reader]:
    def read(source: Source) -> Reader:
        form, _, _, size = source.contents
        if size != STANDARD_BYTES:
            raise TxlError(f"{source}: {name} has {STANDARD_BYTES:,} bytes, this has {size:,}")
        how = (f"{form}; " if form else "") + "standard splits"
        twentieth = STANDARD_BYTES // 20
        ends = (STANDARD_BYTES - 2 * twentieth, STANDARD_BYTES - twentieth)
        return CutFile(source, f"{source} ({how})", ends, strip=name == "text8")

    return read


def _layout(pattern: str) -> Layout:
    return (pattern.format("train"), pattern.format("valid"), pattern.format("test"))


_WIKITEXT = _layout(r"wiki\.{}\.tokens")
_PENN = _layout(r"ptb\.{}\.txt")
_PLAIN = _layout(r"{}\.txt")
_HELDOUT = r"heldout-monolingual\.tokenized\.shuffled/news\.en\.heldout-0000{}-of-00050"
_BILLION = (r"training-monolingual\.tokenized\.shuffled/news\.en-.*", _HELDOUT.format(1), _HELDOUT.format(0))
_ANY = (_PLAIN, _WIKITEXT, _layout(r"wiki\.{}\.raw"))


def _named(*layouts: Layout, several: bool = False) -> Callable[[Source], Reader]:
    return lambda source: readers.named(source, layouts, lines=True, deep=True, several=several)


def _any_text(unit: Unit) -> Callable[[Source], Reader]:
    """Make the reading function of a rule for any text: a file is cut; files of a folder or archive
    go to the splits that their names give; the files of any other folder are distributed by
    `deal`."""

    def read(source: Source) -> Reader:
        lines = unit == "words"
        if source.folder is not None:
            top = [path.name for path in source.folder.iterdir()] if source.path is not None else []
            if any(readers.has_all(top, layout) for layout in _ANY):
                return readers.named(source, _ANY, lines=lines, deep=False)
            return readers.deal(source)
        names = source.contents.names
        if names is not None:
            if not any(readers.has_all(names, layout) for layout in _ANY):
                files = f"{len(names)} file(s) ({some(names)})"
                raise TxlError(f"{source}: is an archive of {files}, no names of splits; unpack it first")
            return readers.named(source, _ANY, lines=lines, deep=True)
        return readers.cut(source, lines=lines)

    return read


_WORD_OPTIONS = ("lower", "min_count", "max_words", "vocabulary")
_ENWIK8 = {"vocabulary": 205, "train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
_WIKITEXT_103 = {"vocabulary": 267_735, "train": 103_227_021, "valid": 217_646, "test": 245_569}
_WIKITEXT_2 = {"vocabulary": 33_278, "train": 2_088_628, "valid": 217_646, "test": 245_569}
_PENN_TREEBANK = {"vocabulary": 10_000, "train": 929_589, "valid": 73_760, "test": 82_430}

RULES = {
    rule.name: rule
    for rule in (
        Rule("enwik8", "bytes", _standard("enwik8"), ("newline",), counts=_ENWIK8),
        Rule("text8", "bytes", _standard("text8"), counts={"vocabulary": 27}),
        Rule("wikitext-103", "words", _named(_WIKITEXT, _PLAIN), ("vocabulary",), counts=_WIKITEXT_103),
        Rule("wikitext-2", "words", _named(_WIKITEXT, _PLAIN), ("vocabulary",), counts=_WIKITEXT_2),
        Rule(
            "penn-treebank", "words", _named(_PENN, _PLAIN), ("vocabulary",),
            lower=True, counted=(0, 1, 2), counts=_PENN_TREEBANK,
        ),
        Rule(
            "one-billion-word", "words", _named(_BILLION, several=True), ("vocabulary",),
            end=SENTENCE, unknown="<UNK>", always_unknown=True, min_count=3, shuffled=True,
            counts={"vocabulary": 793_471},
        ),
        Rule("bytes", "bytes", _any_text("bytes")),
        Rule("words", "words", _any_text("words"), _WORD_OPTIONS, unknown="<unk>"),
    )
}  # fmt: skip
"""The rules by name.

Sizes are those published with the data sets. Words seen equally often stand in the order of their
first appearance; that of a released vocabulary cannot be rebuilt, so pass its file to use it.

One Billion Word: the released code takes heldout-00000 for validation and for testing, which is a
bug; here valid is heldout-00001 and test heldout-00000.
"""


def choose(source: Source, options: PrepareOptions) -> Rule:
    """Return the rule that options name. "auto" recognizes data sets by file names and sizes and
    else takes bytes.

    Raises:
        TxlError: the source cannot be read, or an option does not apply to the rule.
    """
    rule = RULES[_recognised(source) if options.rule == "auto" else options.rule]
    rule.check(options)
    return rule


def _recognised(source: Source) -> str:
    if source.path is None:
        return "bytes"
    if source.path.is_dir():
        names = [path.name for path in source.path.iterdir()]
        inside: list[str] = []
    else:
        _, packed, name, size = source.contents
        if packed is None:
            stems = {source.path.name.split(".")[0], name.split(".")[0]}  # the name of a zip, or of the file in it
            standard = sorted(stems & {"enwik8", "text8"})
            return standard[0] if standard and size == STANDARD_BYTES else "bytes"
        inside, names = packed, [name.rsplit("/", 1)[-1] for name in packed]
    if "wiki.train.tokens" in names:
        told = [source.path.resolve().name, *inside]
        return "wikitext-2" if any("wikitext-2" in part for part in told) else "wikitext-103"
    return "penn-treebank" if "ptb.train.txt" in names else "bytes"
