"""Corpora on disk: splits, memory maps, atomic preparation, constant memory."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from txl.errors import TxlError
from txl.text import corpus as data

ROOT = Path(__file__).parents[3]
SPLITS = ("train", "valid", "test")


def decoded(corpus: data.Corpus) -> list[bytes]:
    return [corpus.vocabulary.decode(corpus.split(name)) for name in SPLITS]


def test_a_file_is_cut_90_5_5(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(10, 110)) * 10)
    splits = decoded(data.prepare(path, tmp_path / "c"))
    assert [len(x) for x in splits] == [900, 50, 50]
    assert b"".join(splits) == path.read_bytes()


def test_a_folder_is_dealt_out_by_file_and_always_alike(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(60):
        (folder / f"{n}.txt").write_text(f"file {n}\n" * (n + 1))
    (folder / "no_end").write_text("no line end")
    (folder / "empty").touch()
    (folder / ".hidden").write_bytes(b"\0\1\2")
    corpus = data.prepare(folder, tmp_path / "c")
    assert corpus.fingerprint == data.prepare(folder, tmp_path / "d").fingerprint
    splits = decoded(corpus)
    total = sum(map(len, splits))
    assert [len(x) / total for x in splits] == pytest.approx([0.9, 0.05, 0.05], abs=0.04)
    names = [set(part.decode().splitlines()) for part in splits]
    assert sum(len(n) for n in names) == 61
    assert not names[0] & names[1]
    assert re.fullmatch(rf"{folder}, 61 files dealt out [\d.]+/[\d.]+/[\d.]+ by size", corpus.source)


def test_a_corpus_is_mapped_and_reopens(corpus: data.Corpus) -> None:
    again = data.load(corpus.folder)
    assert isinstance(again.train, np.memmap)
    assert again.vocabulary == corpus.vocabulary
    assert np.array_equal(again.test, corpus.test)
    assert (again.rule, again.source, again.sentences()) == ("bytes", corpus.source, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", "none.txt: no such file or folder"),
        ("empty.txt", "empty.txt .*: the train split is empty"),
        ("short.txt", "short.txt .*: the valid split is empty; the text is too short"),
        ("folder", "folder: 0 text files found, at least 3 are needed"),
    ],
)
def test_bad_sources(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".image").write_bytes(b"\0\0\0")
    with pytest.raises(TxlError, match=message):
        data.prepare(tmp_path / name, tmp_path / "corpus")


def test_preparing_a_prepared_corpus(corpus: data.Corpus, tmp_path: Path) -> None:
    with pytest.raises(TxlError, match=f"{corpus.folder}: is a prepared corpus already"):
        data.prepare(corpus.folder, tmp_path / "c")
    assert data.open_corpus(corpus.folder, tmp_path).fingerprint == corpus.fingerprint


def test_paths_may_be_strings(text: Path, corpus: data.Corpus, tmp_path: Path) -> None:
    for made in (data.prepare(str(text), str(tmp_path)), data.open_corpus(str(tmp_path), "unused")):
        assert made.fingerprint == corpus.fingerprint
        assert made.folder == tmp_path


PEAK = """
import re, sys
from txl.text import corpus as data
from txl.text.datasets import PrepareOptions
data.prepare(sys.argv[1], sys.argv[2], PrepareOptions(rule=sys.argv[3]))
print(re.search("VmHWM:\\\\s*([0-9]+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow  # 15 MB of text
@pytest.mark.parametrize("rule", ["bytes", "words"])
def test_memory_does_not_grow_with_the_text(rule: str, tmp_path: Path) -> None:
    piece, peaks = b"".join(b"%d words in a line of text\n" % (n % 5000) for n in range(40_000)), []
    for pieces in (4, 24):  # 4.5 and 27 MB
        with (tmp_path / "a.txt").open("wb") as file:
            for _ in range(pieces):
                file.write(piece)
        command = [sys.executable, "-c", PEAK, tmp_path / "a.txt", tmp_path / f"c{pieces}", rule]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] - peaks[0] < 8, peaks


KILLED = """
import os, signal, sys
from txl.text import corpus as data
def progress(what, done, total):
    if what == "encoding" and done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
data.prepare(sys.argv[1], sys.argv[2], progress=progress)
"""


def test_a_killed_preparation_leaves_no_corpus(tmp_path: Path) -> None:
    """The next preparation replaces its temporary folder."""
    big, out = tmp_path / "big.txt", tmp_path / "c"
    big.write_bytes(b"another text altogether\n" * 200_000)
    killed = subprocess.run([sys.executable, "-c", KILLED, big, out], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob(".c.txl.tmp/train.bin")] == ["train.bin"]
    with pytest.raises(TxlError, match=r"not a prepared corpus \(corpus.json is missing\)"):
        data.load(out)
    corpus = data.prepare(big, out)
    assert sum(len(corpus.split(name)) for name in SPLITS) == big.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big.txt", "c"]
    assert sorted(path.name for path in out.iterdir()) == [
        "corpus.json", "test.bin", "train.bin", "valid.bin", "vocabulary.txt",
    ]  # fmt: skip


def test_a_failed_preparation_leaves_nothing(text: Path, tmp_path: Path) -> None:
    def interrupted(what: str, done: int, total: int) -> None:
        if what == "encoding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.prepare(text, tmp_path / "c", progress=interrupted)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", ["corpus", "file", "link", "here"])
def test_existing_path_is_refused_and_kept(
    kind: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(".") if kind == "here" else tmp_path / "c"
    monkeypatch.chdir(tmp_path)
    if kind == "corpus":
        before = data.prepare(text, out)
    elif kind == "file":
        out.write_text("kept")
    elif kind == "link":
        (tmp_path / "empty").mkdir()
        out.symlink_to(tmp_path / "empty")
    with pytest.raises(TxlError, match=f"^{out}: the corpus cannot be written: It exists already; choose another"):
        data.prepare(text, out)
    assert len([*tmp_path.iterdir()]) == {"here": 0, "link": 2}.get(kind, 1)
    if kind == "corpus":
        data.load(out).verify()
        assert data.load(out).fingerprint == before.fingerprint


def test_a_run_that_ended_early_prepares_its_corpus_again(text: Path, corpus: data.Corpus, tmp_path: Path) -> None:
    """A folder that is no corpus of the run is kept: a folder of texts, or a link."""
    options = data.PrepareOptions("words")
    assert data.open_corpus(text, tmp_path / "corpus", options).rule == "words"
    with pytest.raises(TxlError, match="It exists already"):
        data.open_corpus(text, tmp_path)
    with pytest.raises(TxlError, match="no such file"):
        data.open_corpus(tmp_path / "nosuch.txt", tmp_path / "corpus")
    assert data.load(tmp_path / "corpus").rule == "words"
    again = data.open_corpus(text, tmp_path / "corpus")
    assert again.fingerprint == corpus.fingerprint
    assert not (tmp_path / "corpus.new").exists()
    (tmp_path / "link").symlink_to(tmp_path / "corpus")
    with pytest.raises(TxlError, match="It exists already"):
        data.open_corpus(text, tmp_path / "link", options)
    (tmp_path / "corpus" / "notes").touch()
    with pytest.raises(TxlError, match=r"cannot be replaced by .*: Directory not empty"):
        data.open_corpus(text, tmp_path / "corpus", options)
    again.verify()


FULL = """
import resource, signal, sys
from txl.errors import TxlError
from txl.text import corpus as data
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    data.prepare(sys.argv[1], sys.argv[2])
except TxlError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "content"), [(100, b"short " * 20), (500, b"abc" * 30)], ids=["tokens", "JSON"])
def test_full_disk_is_reported_and_leaves_nothing(limit: int, content: bytes, tmp_path: Path) -> None:
    """A child process may write at most `limit` bytes to a file."""
    other = tmp_path / "other.txt"
    other.write_bytes(content)
    command = [sys.executable, "-c", FULL, other, tmp_path / "c", str(limit)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == f"{tmp_path}/c: the corpus cannot be written: File too large\n"
    assert [*tmp_path.iterdir()] == [other]


@pytest.mark.parametrize("name", ["corpus.json", "vocabulary.txt", "train.bin"])
def test_pipes_are_refused_at_once(name: str, corpus: data.Corpus, tmp_path: Path) -> None:
    for path in corpus.folder.iterdir():
        if path.name != name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    os.mkfifo(tmp_path / name)
    with pytest.raises(TxlError, match=r"Not a regular file|not a prepared corpus|Invalid argument"):
        data.load(tmp_path)


def test_missing_files(text: Path, corpus: data.Corpus, tmp_path: Path) -> None:
    with pytest.raises(TxlError, match="not a prepared corpus"):
        data.load(tmp_path)
    data.prepare(text, tmp_path)
    (tmp_path / "test.bin").unlink()
    with pytest.raises(TxlError, match=r"the prepared corpus is damaged .*run `txl prepare` again"):
        data.load(tmp_path)
    with pytest.raises(TxlError, match="split must be one of train, valid, test, got 'dev'"):
        corpus.split("dev")


def test_flipped_bits_of_the_settings_are_found(text: Path, tmp_path: Path) -> None:
    """Corpora that were prepared before they had this checksum open, too."""
    data.prepare(text, tmp_path / "c")
    file = tmp_path / "c" / "corpus.json"
    whole = file.read_text()
    for name, value in (("rule", "byter"), ("source", "another"), ("format", 5.0)):
        file.write_text(json.dumps(json.loads(whole) | {name: value}))
        with pytest.raises(TxlError, match=r"is damaged \(.*; remove the folder, then run `txl prepare` again"):
            data.load(tmp_path / "c")
    file.write_text(whole.replace('"corpus.json"', '"corpus.jsoo"'))
    with pytest.raises(TxlError, match=r"is damaged \(corpus\.json is not as it was written\)"):
        data.load(tmp_path / "c")
    before = json.loads(whole)
    del before["sha256"]["corpus.json"]
    file.write_text(json.dumps(before))
    assert data.load(tmp_path / "c").rule == before["rule"]


def test_corpora_of_the_older_format(tmp_path: Path) -> None:
    meta = {"symbols": [10, 97], "source": "a", "fingerprint": "0"}
    (tmp_path / "corpus.json").write_text(json.dumps(meta))
    with pytest.raises(
        TxlError, match=r"prepared in another version's format; remove the folder, then run `txl prepare` again$"
    ):
        data.load(tmp_path)
