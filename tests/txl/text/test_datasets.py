"""Every data set's rule on tiny files, against tokens written by hand."""

import bz2
from collections.abc import Callable
from pathlib import Path

import pytest
from packed import tarred, written, zipped

from txl.errors import TxlError
from txl.text import corpus as data
from txl.text import datasets
from txl.text.datasets import PrepareOptions

Files = dict[str, str]


def prepared(source: Path, out: Path, **options: object) -> data.Corpus:
    return data.prepare(source, out, PrepareOptions(**options))


def tokens(corpus: data.Corpus) -> list[list[int]]:
    return [split.tolist() for split in (corpus.train, corpus.valid, corpus.test)]


WIKI = {"wiki.train.tokens": " b a\n\n a a <unk>\n", "wiki.valid.tokens": "c b", "wiki.test.tokens": "\n"}
PENN = {"ptb.train.txt": " B a N \n", "ptb.valid.txt": " a c\n", "ptb.test.txt": " c d \n"}
ONE_BILLION = {
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": "a c .\n",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050": "b .\n",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-00002-of-00050": "left out .\n",
    "training-monolingual.tokenized.shuffled/news.en-00002-of-00100": "a a .\nb a .",
    "training-monolingual.tokenized.shuffled/news.en-00001-of-00100": "b b .\n",
}


@pytest.mark.parametrize("rule", ["auto", "wikitext-103", "wikitext-2"])
def test_wikitext(rule: str, tmp_path: Path) -> None:
    corpus = prepared(written(tmp_path / "in", WIKI), tmp_path / "c", rule=rule)
    assert corpus.vocabulary.words == ("<eos>", "a", "b", "<unk>")
    assert tokens(corpus) == [[2, 1, 0, 0, 1, 1, 3, 0], [3, 2, 0], [0]]
    assert corpus.rule == ("wikitext-103" if rule == "auto" else rule)


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_order_of_an_archive_does_not_matter(pack: Callable[..., bytes], tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(pack(*((f"wikitext-103/{name}", content.encode()) for name, content in reversed(WIKI.items()))))
    corpus = prepared(path, tmp_path / "c")
    folder = prepared(written(tmp_path / "in", WIKI), tmp_path / "d")
    assert corpus.rule == "wikitext-103"
    assert corpus.fingerprint == folder.fingerprint


@pytest.mark.parametrize("packed", [False, True])
def test_penn_treebank_counts_all_splits_in_lower_case(packed: bool, tmp_path: Path) -> None:
    if packed:
        source = tmp_path / "simple-examples.tgz"
        names = {f"./simple-examples/data/{name}": content for name, content in reversed(PENN.items())}
        char = ("./simple-examples/data/ptb.char.train.txt", b"_ b")
        source.write_bytes(tarred(char, *((n, c.encode()) for n, c in names.items()), mode="w:gz"))
    else:
        source = written(tmp_path / "in", PENN)
    corpus = prepared(source, tmp_path / "c")
    assert corpus.rule == "penn-treebank"
    assert corpus.vocabulary.words == ("<eos>", "a", "c", "b", "n", "d")
    assert corpus.vocabulary.lower
    assert tokens(corpus) == [[3, 1, 4, 0], [1, 2, 0], [2, 5, 0]]


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_one_billion_word_counted(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txl.text.files.PIECE_BYTES", piece)
    corpus = prepared(written(tmp_path / "in", ONE_BILLION), tmp_path / "c", rule="one-billion-word")
    assert corpus.vocabulary.words == ("<S>", "b", ".", "a", "<UNK>")  # shards by name: b b . first
    assert tokens(corpus) == [[0, 1, 1, 2, 0, 3, 3, 2, 0, 1, 3, 2, 0], [1, 2, 0], [3, 4, 2, 0]]
    monkeypatch.setattr("txl.text.corpus.BLOCK_TOKENS", piece)
    assert corpus.sentences().tolist() == [0, 4, 8]


def test_one_billion_word_with_its_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "1b_word_vocab.txt"
    path.write_text("<UNK>\n.\n<S>\na\n")
    source = tmp_path / "a.tar.gz"
    files = [(f"1-billion-word/{name}", content.encode()) for name, content in ONE_BILLION.items()]
    source.write_bytes(tarred(*files, mode="w:gz"))
    corpus = prepared(source, tmp_path / "c", rule="one-billion-word", vocabulary=path)
    assert corpus.vocabulary.words == ("<UNK>", ".", "<S>", "a")
    assert tokens(corpus) == [[2, 3, 3, 1, 2, 0, 3, 1, 2, 0, 0, 1, 2], [0, 1, 2], [3, 0, 1, 2]]
    assert corpus.vocabulary.start == 2


@pytest.fixture
def standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "STANDARD_BYTES", 200)


@pytest.mark.usefixtures("standard")
def test_enwik8_with_and_without_newlines(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(b"<a b>\n\n   " * 20)
    kept = prepared(tmp_path / "enwik8", tmp_path / "c")
    assert (kept.rule, kept.vocabulary.symbols) == ("enwik8", b"\n <>ab")
    assert [len(split) for split in tokens(kept)] == [180, 10, 10]
    dropped = prepared(tmp_path / "enwik8", tmp_path / "d", newline="drop")
    assert dropped.vocabulary.symbols == b" <>ab"
    assert tokens(dropped)[1] == [1, 3, 0, 4, 2, 0, 0, 0]
    assert dropped.vocabulary.encode(b"<a\n>").tolist() == [1, 3, 2]
    assert data.load(tmp_path / "d").vocabulary == dropped.vocabulary
    assert datasets.RULES["enwik8"].published(PrepareOptions(newline="drop")) == {"vocabulary": 204}


@pytest.mark.usefixtures("standard")
@pytest.mark.parametrize("name", ["text8", "text8.zip", "text8.bz2"])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_text8_is_stripped_at_the_edges_of_its_splits(
    name: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl.text.files.PIECE_BYTES", piece)
    text = b" " + b"ab c" * 44 + b"d  " + b" efgh    i" + b"  xyz  u \n"
    content = {"text8": text, "text8.zip": zipped(("text8", text)), "text8.bz2": bz2.compress(text)}[name]
    (tmp_path / name).write_bytes(content)
    corpus = prepared(tmp_path / name, tmp_path / "c")
    decoded = [corpus.vocabulary.decode(split) for split in tokens(corpus)]
    assert decoded == [text[:180].strip(), b"efgh    i", b"xyz  u"]
    assert corpus.vocabulary.start == 0


def test_a_data_set_of_another_size(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(b"ab" * 100)
    assert prepared(tmp_path / "enwik8", tmp_path / "c").rule == "bytes"
    with pytest.raises(TxlError, match="enwik8: enwik8 has 100,000,000 bytes, this has 200"):
        prepared(tmp_path / "enwik8", tmp_path / "c", rule="enwik8")


PLAIN = {"train.txt": "the cat\nthe dog\nthe cat sat\n", "valid.txt": "the cow\n", "test.txt": "A cat\n"}


def test_any_words(tmp_path: Path) -> None:
    corpus = prepared(written(tmp_path / "in", PLAIN), tmp_path / "c", rule="words")
    assert corpus.vocabulary.words == ("<eos>", "the", "cat", "dog", "sat", "<unk>")
    assert tokens(corpus) == [[1, 2, 0, 1, 3, 0, 1, 2, 4, 0], [1, 5, 0], [5, 2, 0]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_count": 2}, ("<eos>", "the", "cat", "<unk>")),
        ({"min_count": 3}, ("<eos>", "<unk>", "the")),
        ({"max_words": 1}, ("<eos>", "<unk>", "the")),
        ({"max_words": 3}, ("<eos>", "the", "cat", "dog", "<unk>")),
    ],
)
def test_rare_words_become_unknown(options: dict[str, int], words: tuple[str, ...], tmp_path: Path) -> None:
    corpus = prepared(written(tmp_path / "in", PLAIN), tmp_path / "c", rule="words", **options)
    assert corpus.vocabulary.words == words
    kept = [word if word in words else "<unk>" for word in "the cat the dog the cat sat".split()]
    assert corpus.vocabulary.decode(tokens(corpus)[0]).decode().split() == kept


def test_an_unknown_word_is_there_even_if_none_is_needed(tmp_path: Path) -> None:
    files = PLAIN | {"valid.txt": "dog", "test.txt": "sat THE"}
    corpus = prepared(written(tmp_path / "in", files), tmp_path / "c", rule="words", lower=True)
    assert corpus.vocabulary.words[-1] == "<unk>"
    assert corpus.vocabulary.lower
    assert data.load(tmp_path / "c").vocabulary == corpus.vocabulary


def test_a_file_of_words_is_cut_at_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"w{n} x\n" for n in range(100)) + "the last line has no end")
    corpus = prepared(tmp_path / "a.txt", tmp_path / "c", rule="words")
    text = [corpus.vocabulary.decode(split).decode() for split in tokens(corpus)]
    assert all(part.endswith("\n") for part in text)
    assert [part.count("\n") for part in text] == [94, 5, 2]
    assert corpus.source.endswith("(split 90/5/5 by bytes, at line ends)")


@pytest.mark.parametrize("rule", ["bytes", "words"])
def test_pieces_may_end_anywhere(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"été  à {n * 7919 % 997}\t\n \n読む" for n in range(200))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    whole = prepared(tmp_path / "a.txt", tmp_path / "c", rule=rule)
    for size in (1, 7, 64):
        monkeypatch.setattr("txl.text.files.PIECE_BYTES", size)
        small = prepared(tmp_path / "a.txt", tmp_path / f"d{size}", rule=rule)
        assert small.fingerprint == whole.fingerprint


BAD: dict[str, tuple[Files, dict[str, object], str]] = {
    "missing files": (PLAIN, {"rule": "one-billion-word"}, "in: its files must be training-monolingual"),
    "files twice": (
        {f"{folder}/{name}": "x" for folder in "ab" for name in PLAIN},
        {"rule": "wikitext-2"},
        "holds 2 files for train, of which one is needed: a/train.txt, b/train.txt",
    ),
    "empty split": (PLAIN | {"valid.txt": ""}, {"rule": "words"}, "the valid split is empty"),
    "no words": (WIKI | {"wiki.train.tokens": "\n"}, {}, r"in .*: holds no words to make a vocabulary of"),
    "unknown word": (WIKI | {"wiki.train.tokens": "a\n"}, {}, "in .*: the text holds words .*: 'c'"),
    "no UTF-8": (PLAIN | {"train.txt": "a \udcff\n"}, {"rule": "words"}, r"is not UTF-8 \(byte 2 of train\)"),
    "newline": (PLAIN, {"newline": "drop"}, "newline is no option of the rule bytes; it is one of enwik8"),
    "lower": (WIKI, {"lower": True}, "lower is no option of the rule wikitext-103; it is one of words"),
    "vocabulary": (PLAIN, {"rule": "words", "vocabulary": "none"}, "none: cannot be read: No such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sources(case: str, tmp_path: Path) -> None:
    files, options, message = BAD[case]
    with pytest.raises(TxlError, match=message) as raised:
        prepared(written(tmp_path / "in", files), tmp_path / "c", **options)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<eos>\nthe\nthe\n", "v.txt: vocabulary: 'the' is there twice"),
        ("<eos>\0the\0", r"v.txt: is no text in UTF-8 \(a zero byte at 5\); .* iconv"),
        ("the\ncat\n", "v.txt: vocabulary: <eos> is not there"),
        (
            "<eos>\nthe\ncat\n",
            "in .*: the text holds words that the vocabulary lacks, and it has no <unk>: 'dog', 'sat'",
        ),
    ],
)
def test_bad_vocabulary_files(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text(content)
    with pytest.raises(TxlError, match=message):
        prepared(written(tmp_path / "in", PLAIN), tmp_path / "c", rule="words", vocabulary=tmp_path / "v.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "enwik9"}, "rule must be one of auto, enwik8, .*, got 'enwik9'"),
        ({"newline": "no"}, "newline must be keep or drop, got 'no'"),
        ({"min_count": 0}, "min_count must be >= 1, got 0"),
        ({"max_words": 0}, "max_words must be >= 1, got 0"),
        ({"vocabulary": Path("v"), "min_count": 2}, "vocabulary gives the words"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(TxlError, match=message):
        PrepareOptions(**options)


@pytest.mark.parametrize("text", ["some words " * 500, "some words of a text\n" * 3, "words\r" * 500])
def test_too_few_lines_for_three_splits(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text, newline="")
    for options in ({}, {"vocabulary": written(tmp_path, {"v": "<eos>\n<unk>\nsome\n"}) / "v"}):
        with pytest.raises(TxlError, match=r"a.txt .*: the (train|valid|test) split is empty; .* too few lines"):
            prepared(tmp_path / "a.txt", tmp_path / "c", rule="words", **options)
        assert not (tmp_path / "c").exists()


def test_lines_that_end_with_cr_and_lf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CR LF separates lines as LF does, wherever pieces end."""
    text = "".join(f"w{n} x\n" for n in range(60))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_bytes(text.replace("\n", "\r\n").encode())
    want = prepared(tmp_path / "a.txt", tmp_path / "c", rule="words")
    for size in (1, 7, 1000):
        monkeypatch.setattr("txl.text.files.PIECE_BYTES", size)
        found = prepared(tmp_path / "b.txt", tmp_path / f"d{size}", rule="words")
        assert [len(x) for x in tokens(found)] == [len(x) for x in tokens(want)]


def test_word_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txl.text.preparing.LONGEST_WORD", 100)
    monkeypatch.setattr("txl.text.files.PIECE_BYTES", 64)
    (tmp_path / "a.txt").write_text("x" * 1000)
    with pytest.raises(TxlError, match="a word of more than 100 bytes; this is no text of words"):
        prepared(tmp_path / "a.txt", tmp_path / "c", rule="words")
