"""Rules, one for each data set: how the source is split and how it becomes tokens."""

from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path, PurePath

from txl.errors import TxlError
from txl.text import readers
from txl.text.readers import Layout, Reader, Source
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
        layouts: how a data set's files are named; none for a file that is cut, or for any text.
        several: whether a split may have more than one file.
        standard: whether the file has STANDARD_BYTES and is named as the rule.
        strip: remove white space at both ends of each split.
        lower: convert words to lower case.
        end, unknown: the word that ends a line, and the word for words not in the vocabulary.
        counted: the splits whose words make the vocabulary.
        min_count: words that occur less often become unknown.
        shuffled: whether the training split consists of sentences to be shuffled.
        counts: published sizes, by "vocabulary", "train", "valid" and "test" (the latter in
            tokens).
    """

    name: str
    unit: Unit
    takes: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    several: bool = False
    standard: bool = False
    strip: bool = False
    lower: bool = False
    end: str = LINE_END
    unknown: str | None = None
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

    def read(self, source: Source) -> Reader:
        """Return a reader of the source's splits. Any text is cut if it is one file; files of a
        folder or archive go to the splits that their names give; the files of any other folder are
        distributed by `deal`.

        Raises:
            TxlError: the source is not as the rule requires.
        """
        lines = self.unit == "words"
        if self.layouts:
            found = readers.named(source, self.layouts, lines=lines, several=self.several)
            if found is None:
                wanted = "; or ".join(map(", ".join, self.layouts))
                raise TxlError(f"{source}: its files must be {wanted}")
            return found
        if self.standard and source.text_bytes != STANDARD_BYTES:
            raise TxlError(f"{source}: {self.name} has {STANDARD_BYTES:,} bytes, this has {source.text_bytes:,}")
        found = None if self.standard else readers.named(source, _ANY, lines=lines)
        if found is not None:
            return found
        if source.path.is_dir():
            return readers.deal(source)
        names = source.names
        if len(names) != 1:
            some = ", ".join(map(repr, names[:3])) + (", .." if len(names) > 3 else "")
            raise TxlError(
                f"{source}: is an archive of {len(names)} files ({some}), no names of splits; unpack it first"
            )
        return readers.cut(source, lines=lines, strip=self.strip)


def _layout(pattern: str) -> Layout:
    return (pattern.format("train"), pattern.format("valid"), pattern.format("test"))


_WIKITEXT, _PENN, _PLAIN = _layout("wiki.{}.tokens"), _layout("ptb.{}.txt"), _layout("{}.txt")
_HELDOUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-0000{}-of-00050"
_BILLION = ("training-monolingual.tokenized.shuffled/news.en-*", _HELDOUT.format(1), _HELDOUT.format(0))
_ANY = (_PLAIN, _WIKITEXT, _layout("wiki.{}.raw"))
_WORD_OPTIONS = ("lower", "min_count", "max_words", "vocabulary")
_ENWIK8 = {"vocabulary": 205, "train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
_WIKITEXT_103 = {"vocabulary": 267_735, "train": 103_227_021, "valid": 217_646, "test": 245_569}
_WIKITEXT_2 = {"vocabulary": 33_278, "train": 2_088_628, "valid": 217_646, "test": 245_569}
_PENN_TREEBANK = {"vocabulary": 10_000, "train": 929_589, "valid": 73_760, "test": 82_430}

RULES = {
    rule.name: rule
    for rule in (
        Rule("enwik8", "bytes", ("newline",), standard=True, counts=_ENWIK8),
        Rule("text8", "bytes", standard=True, strip=True, counts={"vocabulary": 27}),
        Rule("wikitext-103", "words", ("vocabulary",), (_WIKITEXT, _PLAIN), counts=_WIKITEXT_103),
        Rule("wikitext-2", "words", ("vocabulary",), (_WIKITEXT, _PLAIN), counts=_WIKITEXT_2),
        Rule(
            "penn-treebank", "words", ("vocabulary",), (_PENN, _PLAIN),
            lower=True, counted=(0, 1, 2), counts=_PENN_TREEBANK,
        ),
        Rule(
            "one-billion-word", "words", ("vocabulary",), (_BILLION,), several=True,
            end=SENTENCE, unknown="<UNK>", min_count=3, shuffled=True,
            counts={"vocabulary": 793_471},
        ),
        Rule("bytes", "bytes"),
        Rule("words", "words", _WORD_OPTIONS, unknown="<unk>"),
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
    names = source.names
    if not source.path.is_dir() and len(names) == 1:
        stems = [PurePath(name).name.split(".")[0] for name in (source.path.name, names[0])]  # a zip's, or in it
        alike = next((rule.name for rule in RULES.values() if rule.standard and rule.name in stems), None)
        return alike if alike is not None and source.text_bytes == STANDARD_BYTES else "bytes"
    held = {
        rule.name: [name for name in names if readers.fits(name, rule.layouts[0][0])]
        for rule in RULES.values()
        if rule.layouts
    }
    found = [name for name, training in held.items() if training]
    if len({RULES[name].layouts for name in found}) > 1:
        raise TxlError(f"{source}: holds files of {', '.join(found)}; pass those of one, or name its rule with --as")
    candidates = [source.path.resolve().name, *chain(*held.values())]  # WikiText-103 or -2
    return next((name for name in found if any(name in part for part in candidates)), (*found, "bytes")[0])
