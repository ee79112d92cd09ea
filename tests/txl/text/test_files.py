"""Files as text: compressed ones and archives are read as what they hold, or refused in one line
that says what they are; pipes are read while somebody writes."""

import bz2
import contextlib
import gzip
import lzma
import os
import random
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packed import tarred, zipped

from txl.errors import TxlError
from txl.text import corpus as data
from txl.text import datasets, files
from txl.text.preparing import encode_file
from txl.text.vocabulary import ByteVocabulary, WordVocabulary

TEXT = b"".join(b"line %d of a text that is to be read\n" % n for n in range(3000))


def of_the_oldest_kind(archive: bytes) -> bytes:
    """Without the magic bytes, which came later."""
    header = bytearray(archive[:512])
    header[257:265], header[148:156] = bytes(8), b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + archive[512:]


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "bzip2": bz2.compress,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "zip": lambda text: zipped(("folder/", b""), ("folder/a.txt", text)),
}
TARS = {
    "plain": tarred(("a.txt", TEXT)),
    "oldest kind": of_the_oldest_kind(tarred(("a.txt", TEXT))),
    "bzip2": tarred(("a.txt", TEXT), mode="w:bz2"),
    "gzip": tarred(("a.txt", TEXT), mode="w:gz"),
    "xz": tarred(("a.txt", TEXT), mode="w:xz"),
}
SPLITS = ("train", "valid", "test")


def streamed(path: Path) -> bytes:
    return b"".join(files.pieces(path))


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("packer", PACKERS)
def test_the_text_is_what_is_read_whatever_the_name(packer: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", PACKERS[packer](TEXT))
    corpus = data.prepare(path, tmp_path / "corpus")
    assert b"".join(corpus.vocabulary.decode(corpus.split(name)) for name in SPLITS) == TEXT
    assert corpus.source == f"{path} (split 90/5/5 by bytes)"


@pytest.mark.parametrize("kind", TARS)
def test_a_tar_archive_of_one_file_is_its_text(kind: str, tmp_path: Path) -> None:
    """Also from a pipe."""
    path = written(tmp_path / "a.txt", TARS[kind])
    corpus = data.prepare(path, tmp_path / "corpus")
    assert b"".join(corpus.vocabulary.decode(corpus.split(name)) for name in SPLITS) == TEXT
    os.mkfifo(tmp_path / "p")
    writer = threading.Thread(target=(tmp_path / "p").write_bytes, args=(TARS[kind],))
    writer.start()
    assert files.read(tmp_path / "p") == TEXT
    writer.join()


@pytest.mark.parametrize("packer", ["bzip2", "gzip", "xz"])
def test_several_streams_one_after_the_other(packer: str, tmp_path: Path) -> None:
    """As parallel compressors write them."""
    path = written(tmp_path / "a", PACKERS[packer](TEXT[:500]) + PACKERS[packer](TEXT[500:]))
    assert files.read(path) == TEXT
    assert streamed(path) == TEXT


def test_plain_text_is_left_alone(tmp_path: Path) -> None:
    for head in (b"BZh9 is how bzip2 begins. ", b"PK, said he. ", b"LZIP too. ", b"x" * 257 + b"ustar"):
        path = written(tmp_path / "a.bz2", head + TEXT)
        assert files.read(path) == head + TEXT
        assert streamed(path) == head + TEXT


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("enwik8.zip", zipped(("enwik8", b"ab" * 10_000))),
        ("download.zip", zipped(("data/enwik8", b"ab" * 10_000))),
        ("text8.bz2", bz2.compress(b"ab" * 10_000)),
        ("enwik8.txt.gz", gzip.compress(b"ab" * 10_000)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # the bytes hold the time of day
)
def test_standard_splits(name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "STANDARD_BYTES", 20_000)
    corpus = data.prepare(written(tmp_path / name, content), tmp_path / "corpus")
    assert [len(corpus.split(n)) for n in SPLITS] == [18_000, 1_000, 1_000]
    assert corpus.rule == name.split(".")[0].replace("download", "enwik8")


def encrypted() -> bytes:
    archive = bytearray(zipped(("a.txt", TEXT)))
    archive[6] |= 1  # the flag, in the member's header and in the directory
    archive[archive.index(b"PK\1\2") + 8] |= 1
    return bytes(archive)


def of_unknown_method() -> bytes:
    archive = bytearray(zipped(("a.txt", TEXT)))
    archive[8] = archive[archive.index(b"PK\1\2") + 10] = 97  # WavPack
    return bytes(archive)


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(b ^ 0x55 for b in content[middle : middle + 40]) + content[middle + 40 :]


NO_TEXT = r"is no text in UTF-8 \(a zero byte at \d+\)"
PACKED = "is compressed data or an archive, not text; unpack it first"
REFUSED: dict[str, tuple[bytes, str]] = {
    "several.zip": (
        zipped(*((f"{n}.txt", TEXT) for n in range(5))),
        r"is an archive of 5 files \('0.txt', '1.txt', '2.txt', \.\.\), no names of splits; unpack it first",
    ),
    "empty.zip": (zipped(), r"is an archive of 0 files \(\), no names"),
    "encrypted.zip": (encrypted(), "zip data is truncated or damaged: .*encrypted"),
    "method.zip": (of_unknown_method(), "zip data is truncated or damaged: .*not supported"),
    "a.tar.gz": (
        tarred(("a.txt", TEXT), ("b", b""), mode="w:gz"),
        r"is an archive of 2 files \('a.txt', 'b'\), no names",
    ),
    "twice.gz": (gzip.compress(bz2.compress(TEXT)), PACKED),
    "a.7z": (b"7z\xbc\xaf\x27\x1c" + TEXT, PACKED),
    "a.rar": (b"Rar!\x1a\x07\x00" + TEXT, PACKED),
    "a.lz4": (b"\x04\x22\x4d\x18" + TEXT, PACKED),
    "a.Z": (b"\x1f\x9d\x90" + TEXT, PACKED),
    "a.zst": (b"\x28\xb5\x2f\xfd" + TEXT, PACKED),
    "a.lzma": (lzma.compress(TEXT, lzma.FORMAT_ALONE), PACKED),
    "a.lz": (b"LZIP\x01" + TEXT, PACKED),
    "zst.zip": (zipped(("a.txt", b"\x28\xb5\x2f\xfd" + TEXT)), "a.txt: " + PACKED),
    "tar.zip": (zipped(("a.tar", tarred(("a.txt", TEXT)))), "a.tar: " + PACKED),
    "tar.tar": (tarred(("a.tar", tarred(("a.txt", TEXT)))), "a.tar: " + PACKED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    with pytest.raises(TxlError, match=rf"^\S*/{name}: .*{message}"):
        data.prepare(written(tmp_path / name, content), tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_archives_are_no_text_to_read_at_once(tmp_path: Path) -> None:
    for name, message in {
        "several.zip": "is an archive of several files; unpack it and pass one of them",
        "empty.zip": "is an archive of no files",
        "a.tar.gz": "is an archive of several files",
    }.items():
        with pytest.raises(TxlError, match=message):
            files.read(written(tmp_path / name, REFUSED[name][0]))


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("harm", ["truncated", "damaged"])
def test_broken_files(packer: str, harm: str, tmp_path: Path) -> None:
    whole = PACKERS[packer](random.Random(0).randbytes(4000) + TEXT)
    broken = whole[: len(whole) // 2] if harm == "truncated" else damaged(whole)
    path = written(tmp_path / "a", broken)
    for reading in (files.read, streamed):
        with pytest.raises(TxlError, match=rf"its {packer} data is truncated or damaged: "):
            reading(path)


@pytest.mark.parametrize("packer", PACKERS)
def test_a_bomb_is_stopped_at_the_limit(packer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 3_000_000)
    path = written(tmp_path / "bomb", PACKERS[packer](b"a" * 3_000_000))
    assert len(files.read(path)) == 3_000_000
    written(path, PACKERS[packer](b"a" * 3_000_001))
    with pytest.raises(TxlError, match=r"holds more than 0\.003 GB of text, too much to read at once"):
        files.read(path)
    assert len(streamed(path)) == 3_000_001  # no limit where memory does not grow


@pytest.mark.parametrize("packer", [*PACKERS, "plain"])
@pytest.mark.parametrize("unit", ["bytes", "words"])
def test_the_first_tokens_take_no_more_of_a_file_than_they_need(
    packer: str, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows them is not of the vocabulary, and more than may be read at once."""
    monkeypatch.setattr(files, "LARGEST_BYTES", 1_500_000)
    text = TEXT + b"#" * 3_000_000
    path = written(tmp_path / "a", PACKERS.get(packer, bytes)(text))
    words = WordVocabulary(sorted({"<eos>", *TEXT.decode().split()}))
    vocabulary = ByteVocabulary(bytes(sorted(set(TEXT))), b"\n") if unit == "bytes" else words
    wanted = vocabulary.encode(TEXT)
    for limit in (1, 100, len(wanted)):
        found = encode_file(vocabulary, path, limit)
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted[:limit].tolist()
    with pytest.raises(TxlError):
        encode_file(vocabulary, path)
    short = written(tmp_path / "b", TEXT[:-1])
    assert encode_file(vocabulary, short, 10**6).tolist() == vocabulary.encode(TEXT[:-1]).tolist()


ENCODED = {
    f"{encoding}, {kind}": (mark + "".join(lines).encode(encoding), mark)
    for encoding, mark in {
        "utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff", "utf-32-le": b"\xff\xfe\0\0", "utf-32-be": b"\0\0\xfe\xff",
    }.items()
    for kind, lines in {
        "Latin": ["some words\n"] * 60, "Cyrillic": ["несколько слов\n"] * 60, "Han": ["一些詞\n"] * 60,
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("rule", ["bytes", "words"])
@pytest.mark.parametrize("name", ENCODED)
def test_other_encodings_are_refused(name: str, rule: str, tmp_path: Path) -> None:
    """With a byte-order mark or without; in a file, a folder, an archive; as a prompt."""
    (content, mark), plain = ENCODED[name], b"some words\n" * 60
    for text, message in (
        (content, r"is no text in UTF-8 \(the byte-order mark of UTF-16 or UTF-32\); .* iconv"),
        (content[len(mark) :], NO_TEXT + ".* iconv"),
    ):
        written(tmp_path / "a.txt", text)
        written(tmp_path / "a.gz", gzip.compress(text))
        splits = {"train.txt": plain, "valid.txt": text, "test.txt": plain}
        written(tmp_path / "a.zip", zipped(*splits.items()))
        for folder, names in {
            "named": splits,
            "dealt": {f"{n}.txt": text if n == 7 else plain for n in range(60)},
        }.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            for file, held in names.items():
                written(tmp_path / folder / file, held)
        for source, where in {
            "a.txt": "a.txt", "a.gz": "a.gz", "a.zip": "a.zip: valid.txt", "named": "named/valid.txt",
            "dealt": "dealt/7.txt",
        }.items():  # fmt: skip
            with pytest.raises(TxlError, match=rf"^{tmp_path}/{where}: {message}"):
                data.prepare(tmp_path / source, tmp_path / "corpus", datasets.PrepareOptions(rule))
        with pytest.raises(TxlError, match=message):
            files.read(tmp_path / "a.txt")
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize("rule", ["bytes", "words"])
def test_the_mark_of_utf_8_is_no_text(rule: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is that of the text without it, whatever holds the text."""
    monkeypatch.setattr(files, "PIECE_BYTES", piece)
    options, mark, text = datasets.PrepareOptions(rule), b"\xef\xbb\xbf", TEXT[:2000]
    want = data.prepare(written(tmp_path / "plain", text), tmp_path / "c", options)
    for name, content in {
        "txt": mark + text,
        "gz": gzip.compress(mark + text),
        "zip": zipped(("a", mark + text)),
    }.items():
        path = written(tmp_path / name, content)
        assert data.prepare(path, tmp_path / f"d {name}", options).fingerprint == want.fingerprint
        assert files.read(path) == text
    folder, parts = tmp_path / "folder", {f"{n}.txt": TEXT[300 * n : 300 * n + 300] for n in range(60)}
    fingerprints = set()
    for before in (b"", mark):
        folder.mkdir(exist_ok=True)
        for name, content in parts.items():
            written(folder / name, before + content)
        fingerprints.add(data.prepare(folder, tmp_path / f"e{len(before)}", options).fingerprint)
    assert len(fingerprints) == 1
    assert files.read(written(tmp_path / "mark", mark)) == b""


@pytest.mark.parametrize("name", [*ENCODED, "utf-8"])
def test_the_encoding_of_a_pipe(name: str) -> None:
    """As of a file: a text in UTF-8 without its mark, all else refused."""
    content = b"\xef\xbb\xbfsome words" if name == "utf-8" else ENCODED[name][0]
    reading, writing = os.pipe()
    threading.Thread(target=lambda: (os.write(writing, content), os.close(writing))).start()
    try:
        if name == "utf-8":
            assert files.read(f"/dev/fd/{reading}") == b"some words"
        else:
            with pytest.raises(TxlError, match=rf"{reading}: is no text in UTF-8 \(the byte-order mark.* iconv"):
                files.read(f"/dev/fd/{reading}")
    finally:
        os.close(reading)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As the shell's <(..) is."""
    reading, writing = os.pipe()
    os.write(writing, gzip.compress(TEXT))
    os.close(writing)
    assert files.read(f"/dev/fd/{reading}") == TEXT
    os.close(reading)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bz2", b"BZh9\x17rE8P\x90abcd", "its bzip2 data is truncated or damaged"),
        ("b.tgz", REFUSED["a.tar.gz"][0], "is an archive of several files"),
        ("d.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"pixels" * 99, NO_TEXT),
        ("c.zst", b"\x28\xb5\x2f\xfd" + TEXT, PACKED),
    ],
    ids=["bzip2", "tar.gz", "binary", "zstd"],
)
def test_a_folder_leaves_nothing_out(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    """A file that cannot be read as text is named; a compressed text is read."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(60):
        (texts / f"{n}.txt").write_text(f"file {n}\n" * (n + 1))
    written(texts / "60.gz", gzip.compress(b"file 60\n"))
    corpus = data.prepare(texts, tmp_path / "c")
    assert corpus.source.startswith(f"{texts}, 61 files dealt out 90")
    assert sum(b"file 60" in corpus.vocabulary.decode(corpus.split(split)) for split in SPLITS) == 1
    written(texts / name, content)
    with pytest.raises(TxlError, match=rf"^\S*/texts/{name}: {message}"):
        data.prepare(texts, tmp_path / "d")


def test_a_pipe_is_not_prepared(tmp_path: Path) -> None:
    """It is read more than once."""
    reading, writing = os.pipe()
    os.write(writing, TEXT[:1000])
    os.close(writing)
    with pytest.raises(TxlError, match=rf"^/dev/fd/{reading}: is no regular file; .*write it to one first"):
        data.prepare(f"/dev/fd/{reading}", tmp_path / "corpus")
    os.close(reading)


FILES = [
    (f"folder/{name}.txt", random.Random(name).randbytes(3000).hex().encode()) for name in ("train", "valid", "test")
]
ARCHIVES = {
    "zip": zipped(("folder/", b""), *FILES),
    "tar": tarred(*FILES),
    "tar.bz2": tarred(*FILES, mode="w:bz2"),
    "tar.gz": tarred(*FILES, mode="w:gz"),
    "tar.gz, pax": tarred(*FILES, mode="w:gz", form=tarfile.PAX_FORMAT),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_members_in_order(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(ARCHIVES[kind])
    assert [(name, b"".join(pieces)) for name, pieces in files.members(tmp_path / "a")] == FILES
    assert files.names(tmp_path / "a") == [name for name, _ in FILES]


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_truncated_archive_is_one_line(kind: str, tmp_path: Path) -> None:
    whole = (
        ARCHIVES[kind].rstrip(b"\0") + bytes(512) if kind == "tar" else ARCHIVES[kind]
    )  # whose last record is padded
    for cut in {len(whole) * n // 8 for n in range(1, 8)} | {len(whole) - 1}:
        (tmp_path / "a").write_bytes(whole[:cut])
        with pytest.raises(TxlError, match=rf"^{tmp_path}/a: .*truncated or damaged") as raised:
            data.prepare(tmp_path / "a", tmp_path / "c")
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "c").exists()


def test_damage_does_not_end_a_tar_archive(tmp_path: Path) -> None:
    """A header that is none, or an end where no zeros are, inside whole compressed data."""
    whole = tarred(*FILES)
    second = 512 + 6144
    assert whole[second : second + 6] == b"folder"
    for at in range(second + 100, second + 512, 37):
        altered = bytearray(whole)
        altered[at] ^= 0x15
        (tmp_path / "a").write_bytes(gzip.compress(altered))
        with pytest.raises(TxlError, match=r"its tar\.gz data is truncated or damaged"):
            data.prepare(tmp_path / "a", tmp_path / "c")
    for cut in (512 + 100, second, second + 200, 3 * second):
        (tmp_path / "a").write_bytes(gzip.compress(whole[:cut]))
        with pytest.raises(TxlError, match=r"its tar\.gz data is truncated or damaged"):
            data.prepare(tmp_path / "a", tmp_path / "c")


def header(kind: bytes, size: int, name: str = "././@LongLink") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, size
    return entry.tobuf(tarfile.GNU_FORMAT)


def sparse(size: int) -> bytes:
    block = bytearray(header(tarfile.GNUTYPE_SPARSE, 0, "train.txt"))
    block[483:495], block[148:156] = b"%011o\0" % size, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


BOMBS: dict[str, tuple[bytes, str]] = {
    name: (header(kind, 64 << 20) + b"a" * (64 << 20), "a header of more than 1,048,576 bytes")
    for name, kind in {
        "long name": tarfile.GNUTYPE_LONGNAME, "long link": tarfile.GNUTYPE_LONGLINK, "pax": tarfile.XHDTYPE,
        "pax, global": tarfile.XGLTYPE, "pax, Solaris": tarfile.SOLARIS_XHDTYPE,
    }.items()
} | {
    "names without end": ((header(b"L", 5) + b"abcd".ljust(512, b"\0")) * 1500, "recursion|header"),
    "a sparse file": (sparse(8 << 30), "'train.txt' is a sparse file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_has_a_limit(name: str, tmp_path: Path) -> None:
    content, message = BOMBS[name]
    (tmp_path / "a").write_bytes(gzip.compress(content + header(b"0", 0, "test.txt") + bytes(1024), 1))
    tracemalloc.start()
    with pytest.raises(TxlError, match=rf"its tar\.gz data is truncated or damaged: .*({message})"):
        files.names(tmp_path / "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


def test_long_names_are_read(tmp_path: Path) -> None:
    """Of each kind that tar programs write; and a file that is skipped is no header."""
    long = "a" * 90 + "/" + "b" * 1000
    content = random.Random(0).randbytes(3 << 20)
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        (tmp_path / "a").write_bytes(tarred((f"{long}.png", content), (long, TEXT), mode="w:gz", form=form))
        assert files.names(tmp_path / "a") == [f"{long}.png", long]
        assert [b"".join(text) for name, text in files.members(tmp_path / "a") if name == long] == [TEXT]


def test_files_of_an_archive_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 2)
    for kind, content in ARCHIVES.items():
        with pytest.raises(TxlError, match="is an archive of more than 2 files; unpack it first"):
            files.names(written(tmp_path / kind, content))


@pytest.mark.parametrize("name", ["", "\0train.txt"], ids=["empty", "NUL"])
def test_a_zip_entry_without_a_name(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a", "w") as archive:
        entry = zipfile.ZipInfo("x")
        entry.filename = name
        archive.writestr(entry, TEXT)
    for reading in (files.read, streamed):  # Python from 3.12 on reads it
        with contextlib.suppress(TxlError):
            assert reading(tmp_path / "a") == TEXT


def test_flipped_bits_of_a_zip_change_no_text(tmp_path: Path) -> None:
    for whole in (zipped(("a.txt", TEXT[:300])), ARCHIVES["zip"]):
        (tmp_path / "a").write_bytes(whole)
        want, generator = list(map(b"".join, (text for _, text in files.members(tmp_path / "a")))), random.Random(0)
        for _ in range(300):
            altered = bytearray(whole)
            altered[generator.randrange(4, len(whole))] ^= 1 << generator.randrange(8)
            (tmp_path / "a").write_bytes(altered)
            with contextlib.suppress(TxlError):
                assert [b"".join(text) for _, text in files.members(tmp_path / "a")] == want


def test_encrypted_members(tmp_path: Path) -> None:
    archive = bytearray(ARCHIVES["zip"])
    at = -1
    while (at := archive.find(b"PK\1\2", at + 1)) >= 0:
        archive[at + 8] |= 1
    (tmp_path / "a").write_bytes(archive)
    with pytest.raises(TxlError, match=r"a: .*encrypted"):
        data.prepare(tmp_path / "a", tmp_path / "c")


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    writer = threading.Thread(target=(tmp_path / "p").write_bytes, args=(TEXT,))
    writer.start()
    assert files.read(tmp_path / "p") == TEXT
    writer.join()


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_devices(name: str, tmp_path: Path) -> None:
    if not os.path.exists(name):
        pytest.skip(f"{name} is not there")
    with pytest.raises(TxlError, match=r"is a folder, a device or a socket; a file or a pipe is needed"):
        files.read(name)
    with pytest.raises(TxlError):
        data.prepare(name, tmp_path / "c")


def test_pipes_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 10)
    os.mkfifo(tmp_path / "p")
    writer = threading.Thread(target=lambda: (tmp_path / "p").write_bytes(b"x" * 50))
    writer.start()
    with pytest.raises(TxlError, match="holds more than 1e-08 GB of text"):
        files.read(tmp_path / "p")
    writer.join()


def test_the_beginning_of_a_pipe_is_read_while_its_writer_lives() -> None:
    reading, writing = os.pipe()
    os.write(writing, TEXT[:1000])
    vocabulary = ByteVocabulary(bytes(range(256)))
    assert encode_file(vocabulary, Path(f"/dev/fd/{reading}"), 900).tobytes() == TEXT[:900]
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_the_first_of_several_files_is_not_taken_for_the_text(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(ARCHIVES[kind])
    with pytest.raises(TxlError, match="a: is an archive of several files"):
        encode_file(ByteVocabulary(bytes(range(256))), tmp_path / "a", 20)


@pytest.mark.parametrize("form", ["plain", "gzip", "zip", "tar.gz"])
def test_an_error_of_progress_is_none_of_the_file(form: str, tmp_path: Path) -> None:
    def progress(what: str, done: int, total: int) -> None:
        raise RuntimeError("cancelled")

    one = ("t.txt", TEXT)
    content = {"plain": TEXT, "gzip": gzip.compress(TEXT), "zip": zipped(one), "tar.gz": tarred(one, mode="w:gz")}[form]
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(RuntimeError, match="cancelled"):
        data.prepare(tmp_path / "a", tmp_path / "c", progress=progress)


def test_a_file_of_an_archive_is_read_for_its_name_its_size_and_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []
    members = files.members
    monkeypatch.setattr(files, "members", lambda path: reads.append(path) or members(path))
    (tmp_path / "a").write_bytes(tarred(("t.txt", TEXT), mode="w:gz"))
    data.prepare(tmp_path / "a", tmp_path / "c")
    assert len(reads) == 4


def test_a_split_that_is_a_pipe_is_refused_at_once(corpus: data.Corpus, tmp_path: Path) -> None:
    for path in corpus.folder.iterdir():
        if path.name != "train.bin":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    os.mkfifo(tmp_path / "train.bin")
    with pytest.raises(TxlError, match="the prepared corpus is damaged"):
        data.load(tmp_path)
