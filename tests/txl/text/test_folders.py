"""Folders as sources: data sets as in their archives, files dealt out, hidden files left out."""

import re
from pathlib import Path

import pytest
from packed import tarred, written, zipped

from txl.errors import TxlError
from txl.text import corpus as data
from txl.text import datasets, files
from txl.text.datasets import PrepareOptions

Files = dict[str, bytes]

LINE = b"the cat sat on the mat\n"
PENN = {f"simple-examples/data/ptb.{split}.txt": b" the cat \n sat \n" for split in ("train", "valid", "test")} | {
    "simple-examples/README": b"read me",
    "simple-examples/data/ptb.char.train.txt": b"_ t",
}
SHARDS = "training-monolingual.tokenized.shuffled/news.en-0000"
ONE_BILLION = {f"1-billion/{SHARDS}{n}-of-00100": b"a b c .\n" * 4 for n in range(2)} | {
    f"1-billion/heldout-monolingual.tokenized.shuffled/news.en.heldout-0000{n}-of-00050": b"a c .\n" for n in range(3)
}
UNPACKED: dict[str, tuple[Files, str]] = {
    "Penn Treebank": (PENN, "penn-treebank"),
    "One Billion Word": (ONE_BILLION, "one-billion-word"),
    "WikiText": ({f"wikitext-2/wiki.{split}.tokens": LINE for split in ("train", "valid", "test")}, "wikitext-2"),
    "WikiText, raw": ({f"wikitext-2-raw/wiki.{split}.raw": LINE for split in ("train", "valid", "test")}, "bytes"),
    "files with the splits' names": (
        {f"a/b/{split}.txt": LINE for split in ("train", "valid", "test")} | {"a/README": LINE}, "bytes"),
    "enwik8": ({"enwik8": LINE * 100}, "enwik8"),
    "one file": ({"a/text": LINE * 100}, "bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPACKED)
def test_an_unpacked_data_set_is_as_its_archive(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "STANDARD_BYTES", 100 * len(LINE))
    held, rule = UNPACKED[name]
    (tmp_path / "archive").write_bytes(tarred(*held.items(), mode="w:gz"))
    want = data.prepare(tmp_path / "archive", tmp_path / "c")
    folder = written(tmp_path / "in", held)
    found = data.prepare(folder, tmp_path / "d")
    assert (found.rule, found.fingerprint) == (rule, want.fingerprint)
    assert found.source == want.source.replace("/archive ", "/in ")


@pytest.mark.parametrize("packed", [False, True])
def test_two_data_sets_in_one_source_are_refused(packed: bool, tmp_path: Path) -> None:
    held = PENN | UNPACKED["WikiText"][0]
    source = written(tmp_path / "in", held)
    if packed:
        source = tmp_path / "a.zip"
        source.write_bytes(zipped(*held.items()))
    message = f"{source}: holds files of wikitext-103, wikitext-2, penn-treebank; pass those of one, or name its rule"
    with pytest.raises(TxlError, match=re.escape(message)):
        data.prepare(source, tmp_path / "c")
    assert data.prepare(source, tmp_path / "c", PrepareOptions("penn-treebank")).rule == "penn-treebank"


def test_the_splits_are_those_of_the_outermost_folder(tmp_path: Path) -> None:
    plain = {f"{split}.txt": f"{split} {n}\n".encode() for n, split in enumerate(("train", "valid", "test"))}
    inner = {f"old/{name}": b"x\n" for name in plain} | {"notes/test.txt": b"y\n"}
    corpus = data.prepare(written(tmp_path / "in", plain | inner), tmp_path / "c")
    assert corpus.vocabulary.decode(corpus.train) == plain["train.txt"]
    (tmp_path / "in" / "train.txt").unlink()
    corpus = data.prepare(tmp_path / "in", tmp_path / "d")
    assert corpus.vocabulary.decode(corpus.train) == b"x\n"


def test_the_standard_library_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = PENN | {f"package/{n}.py": LINE for n in range(100)} | {"site-packages/a.py": b"#", "train.txt": LINE}
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(written(tmp_path / "lib", held))})
    corpus = data.prepare(None, tmp_path / "c")
    assert corpus.source == "the Python standard library, 100 files dealt out 90/5/5 by size"


def dealt(folder: Path, sizes: list[int], out: Path) -> data.Corpus:
    return data.prepare(written(folder, {f"{n}.txt": b"x" * (size - 1) + b"\n" for n, size in enumerate(sizes)}), out)


@pytest.mark.parametrize("sizes", [[1000] * 5, [1000] * 10, [30, 9000, 50, 400, 900, 1, 7000]])
def test_reported_shares_are_those_dealt(sizes: list[int], tmp_path: Path) -> None:
    corpus = dealt(tmp_path / "in", sizes, tmp_path / "c")
    got = [len(split) for split in (corpus.train, corpus.valid, corpus.test)]
    assert sum(got) == sum(sizes)
    assert got[0] > sum(got[1:])
    shares = "/".join(f"{round(100 * size / sum(sizes), 1):g}" for size in got)
    assert corpus.source == f"{tmp_path / 'in'}, {len(sizes)} files dealt out {shares} by size"


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [([1000] * 3, "33.3/33.3/33.3"), ([1000] * 4, "50/25/25"), ([9000, 600, 9000], "3.2/48.4/48.4")],
)
def test_a_train_split_that_is_no_more_than_half_is_refused(sizes: list[int], shares: str, tmp_path: Path) -> None:
    message = (
        rf"in: its {len(sizes)} text files are too few or too uneven to deal out 90/5/5 \(.* would get {shares}\); "
    )
    with pytest.raises(TxlError, match=message + "pass one file, or name three train.txt, valid.txt and test.txt"):
        dealt(tmp_path / "in", sizes, tmp_path / "c")
    assert not (tmp_path / "c").exists()


HIDDEN = {
    "__MACOSX/._t.txt": b"\0\5\x16\7" * (1 << 19),  # more than a tar header may have
    "a/._t.txt": b"\0\5\x16\7",
    ".DS_Store": b"\0\0\0\1",
    ".git/text": LINE,
}


@pytest.mark.parametrize("form", ["folder", "zip", "tar", "tar.gz"])
def test_hidden_files_are_left_out(form: str, tmp_path: Path) -> None:
    held, source = HIDDEN | {"./a/t.txt": LINE * 100}, tmp_path / "source"
    if form == "folder":
        written(source, held)
    else:
        source.write_bytes(
            zipped(*held.items()) if form == "zip" else tarred(*held.items(), mode="w" + form[3:].replace(".", ":"))
        )
        assert files.read(source) == LINE * 100
    corpus = data.prepare(source, tmp_path / "c")
    assert corpus.source == f"{source} (split 90/5/5 by bytes)"
    assert corpus.vocabulary.decode(corpus.test) == (LINE * 100)[-115:]
