"""Corpora on disk: split as they say, mapped, whole or not there, in memory that stays constant."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from txl.errors import TxlError
from txl.text import corpus as data
from txl.text.preparing import checksum

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
    assert f"{folder}, 61 files dealt out 90/5/5" == corpus.source


def test_the_default_is_the_standard_library(tmp_path: Path) -> None:
    corpus = data.prepare(None, tmp_path)
    sizes = [len(corpus.split(name)) for name in SPLITS]
    assert b"import " in corpus.vocabulary.decode(corpus.valid[:100_000])
    assert sizes[0] > 5_000_000
    assert [round(size / sum(sizes), 2) for size in sizes] == pytest.approx([0.9, 0.05, 0.05], abs=0.02)
    assert corpus.source.startswith("the Python standard library, ")


def test_a_corpus_is_mapped_and_reopens(corpus: data.Corpus) -> None:
    again = data.load(corpus.folder)
    assert isinstance(again.train, np.memmap)
    assert again.vocabulary == corpus.vocabulary
    assert np.array_equal(again.test, corpus.test)
    assert (again.rule, again.source, again.sentences) == ("bytes", corpus.source, None)


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
    with pytest.raises(TxlError, match=r"\.bin: is no text"):
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


@pytest.mark.parametrize("rule", ["bytes", "words"])
def test_memory_does_not_grow_with_the_text(rule: str, tmp_path: Path) -> None:
    piece, peaks = b"".join(b"%d words in a line of text\n" % (n % 5000) for n in range(40_000)), []
    for pieces in (4, 24):  # 4.5 and 27 MB
        with (tmp_path / "a.txt").open("wb") as file:
            for _ in range(pieces):
                file.write(piece)
        command = [sys.executable, "-c", PEAK, tmp_path / "a.txt", tmp_path / "c", rule]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] - peaks[0] < 8, peaks


def test_preparing_again_leaves_the_mapped_arrays_alone(text: Path, tmp_path: Path) -> None:
    first = data.prepare(text, tmp_path / "c")
    before = np.array(first.train)
    other = tmp_path / "other.txt"
    other.write_text("short " * 20)
    assert data.prepare(other, tmp_path / "c").fingerprint != first.fingerprint
    assert np.array_equal(first.train, before)


KILLED = """
import os, signal, sys
from txl.text import corpus as data
def progress(what, done, total):
    if what == "encoding" and done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
data.prepare(sys.argv[1], sys.argv[2], progress=progress)
"""


def test_a_killed_preparation_leaves_the_corpus_before(text: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.txt"
    big.write_bytes(b"another text altogether\n" * 200_000)
    before = data.prepare(text, tmp_path / "c")
    for out in ("c", "fresh"):
        command = [sys.executable, "-c", KILLED, big, tmp_path / out]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "c" / ".train.bin.tmp").stat().st_size > 0
    after = data.load(tmp_path / "c")
    assert after.fingerprint == before.fingerprint
    assert decoded(after) == decoded(before)
    with pytest.raises(TxlError, match=r"not a prepared corpus \(corpus.json is missing\)"):
        data.load(tmp_path / "fresh")
    again = data.prepare(big, tmp_path / "c")
    assert sum(len(again.split(name)) for name in SPLITS) == big.stat().st_size
    assert sorted(path.name for path in again.folder.iterdir()) == [
        "corpus.json", "test.bin", "train.bin", "valid.bin", "vocabulary.txt",
    ]  # fmt: skip


def test_a_failed_preparation_leaves_the_corpus_before(text: Path, tmp_path: Path) -> None:
    before = data.prepare(text, tmp_path / "c")
    names = sorted(path.name for path in before.folder.iterdir())
    other = tmp_path / "other.txt"
    other.write_text("short " * 20)

    def full(what: str, done: int, total: int) -> None:
        if what == "encoding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.prepare(other, tmp_path / "c", progress=full)
    assert data.load(tmp_path / "c").fingerprint == before.fingerprint
    assert sorted(path.name for path in before.folder.iterdir()) == names
    with pytest.raises(KeyboardInterrupt):
        data.prepare(other, tmp_path / "fresh", progress=full)
    assert not (tmp_path / "fresh").exists()


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


@pytest.mark.parametrize(
    ("name", "limit", "content"),
    [
        ("train.bin", 100, b"short " * 20),
        ("vocabulary.txt", 300, bytes(range(1, 201))),
        ("corpus.json", 500, b"abc" * 30),
    ],
)
def test_a_full_disk_leaves_the_corpus_before_and_names_the_file(
    name: str, limit: int, content: bytes, text: Path, tmp_path: Path
) -> None:
    """In a process of its own that cannot write more than so many bytes to a file."""
    before = data.prepare(text, tmp_path / "c")
    other = tmp_path / "other.txt"
    other.write_bytes(content)
    command = [sys.executable, "-c", FULL, other, tmp_path / "c", str(limit)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == f"{tmp_path}/c: the corpus cannot be written: File too large ({name})\n"
    after = data.load(tmp_path / "c")
    assert after.fingerprint == before.fingerprint
    assert decoded(after) == decoded(before)
    assert not list((tmp_path / "c").glob(".*"))


@pytest.mark.parametrize("name", ["train.bin", "sentences.bin", "vocabulary.txt", "corpus.json"])
@pytest.mark.parametrize("before", [False, True])
def test_planted_links_are_not_followed(name: str, before: bool, text: Path, tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "c"
    victim.write_text("kept")
    folder.mkdir()
    if before:
        data.prepare(text, folder)
    (folder / f".{name}.tmp").symlink_to(victim)
    data.prepare(text, folder).verify()
    assert victim.read_text() == "kept"
    assert not [path for path in folder.iterdir() if path.is_symlink() or path.name.startswith(".")]


FORGED = {
    "vocabulary": (None, [], {"unit": "words", "end": 3}, {"unit": "bytes", "dropped": 10**15}),
    "dtype": ("object", "float64", 3), "tokens": ({"train": "a"}, [], None), "sentences": ("x", -1, True),
    "source": (None, 3), "sha256": ([], {"vocabulary": None}), "rule": (5,), "fingerprint": (None,),
}  # fmt: skip


@pytest.mark.parametrize("field", FORGED)
def test_forged_values_are_named(field: str, corpus: data.Corpus, tmp_path: Path) -> None:
    """The checksum is right."""
    for path in corpus.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for value in FORGED[field]:
        meta = json.loads((corpus.folder / "corpus.json").read_text()) | {field: value}
        meta["checksum"] = checksum(meta)
        (tmp_path / "corpus.json").write_text(json.dumps(meta))
        with pytest.raises(TxlError, match=r"the prepared corpus is damaged \(.*; run `txl prepare` again$") as raised:
            data.load(tmp_path)
        assert any(word in str(raised.value) for word in (field, "end", "dropped"))


@pytest.mark.parametrize("name", ["corpus.json", "vocabulary.txt", "train.bin", ".corpus.json.tmp"])
def test_pipes_are_refused_at_once(name: str, corpus: data.Corpus, tmp_path: Path) -> None:
    for path in corpus.folder.iterdir():
        if path.name != name and not name.startswith("."):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    os.mkfifo(tmp_path / name)
    with pytest.raises(TxlError, match=r"Not a regular file|not a prepared corpus|Invalid argument"):
        data.load(tmp_path)


@pytest.mark.parametrize("renames", range(5))
@pytest.mark.parametrize("death", [KeyboardInterrupt, SystemExit])
def test_one_that_ends_between_two_renames(
    renames: int, death: type[BaseException], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens the corpus next finishes what was begun."""
    data.prepare(text, tmp_path / "c")
    other = tmp_path / "other.txt"
    other.write_text("short " * 20)
    left, replace = [renames], Path.replace

    def dying(path: Path, target: Path) -> Path:
        if not left[0]:
            raise death
        left[0] -= 1
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(death):
        data.prepare(other, tmp_path / "c")
    monkeypatch.undo()
    after = data.load(tmp_path / "c")
    after.verify()
    assert decoded(after)[0].startswith(b"short short")
    assert not list((tmp_path / "c").glob(".*"))


def test_one_that_ends_while_it_says_what_it_wrote(corpus: data.Corpus, tmp_path: Path) -> None:
    whole = (corpus.folder / "corpus.json").read_bytes()
    for n in (0, 10, len(whole) - 2):
        (tmp_path / ".corpus.json.tmp").write_bytes(whole[:n])
        with pytest.raises(TxlError, match=r"not a prepared corpus \(corpus.json is missing\)"):
            data.load(tmp_path)


def test_two_preparations_into_one_folder(text: Path, tmp_path: Path) -> None:
    before = data.prepare(text, tmp_path / "c")
    other = tmp_path / "other.txt"
    other.write_text("short " * 20)

    def meanwhile(what: str, done: int, total: int) -> None:
        if what == "encoding":
            with pytest.raises(TxlError, match=r"/c: another process is preparing a corpus there$"):
                data.prepare(text, tmp_path / "c")

    after = data.prepare(other, tmp_path / "c", progress=meanwhile)
    assert after.fingerprint != before.fingerprint
    assert decoded(after) == decoded(data.load(tmp_path / "c"))


def test_progress_of_each_reading(text: Path, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    data.prepare(text, tmp_path / "c", progress=lambda what, *done: seen.setdefault(what, []).append(done))
    size = text.stat().st_size
    assert list(seen) == ["looking", "counting", "encoding"]
    assert all(entries[-1] == (size, size) for entries in seen.values())


def test_damaged_corpora(text: Path, corpus: data.Corpus, tmp_path: Path) -> None:
    with pytest.raises(TxlError, match="not a prepared corpus"):
        data.load(tmp_path)
    data.prepare(text, tmp_path)
    for name in ("valid.bin", "vocabulary.txt", "corpus.json"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-5])
        with pytest.raises(TxlError, match=r"the prepared corpus is damaged .*run `txl prepare` again"):
            data.load(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "test.bin").unlink()
    with pytest.raises(TxlError, match="the prepared corpus is damaged"):
        data.load(tmp_path)
    with pytest.raises(TxlError, match="split must be one of train, valid, test, got 'dev'"):
        corpus.split("dev")


def test_corpora_of_the_older_format(tmp_path: Path) -> None:
    meta = {"symbols": [10, 97], "source": "a", "fingerprint": "0"}
    (tmp_path / "corpus.json").write_text(json.dumps(meta))
    with pytest.raises(TxlError, match=r"prepared in another version's format; run `txl prepare` again$"):
        data.load(tmp_path)
