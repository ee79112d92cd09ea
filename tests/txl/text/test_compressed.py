"""Compressed files: read as the text they hold, or refused in one line that says what they are."""

import bz2
import gzip
import lzma
import os
import random
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packed import tarred, zipped

from txl.errors import TxlError
from txl.text import compressed, rules
from txl.text import corpus as data
from txl.text.pieces import Stream

TEXT = b"".join(b"line %d of a text that is to be read\n" % n for n in range(3000))
# One raw block of 3 bytes, so that there is a file where nothing can write one.
ZSTD = b"\x28\xb5\x2f\xfd\x00\x58\x19\x00\x00abc"


def of_the_oldest_kind(archive: bytes) -> bytes:
    """Without the magic bytes, which came later."""
    header = bytearray(archive[:512])
    header[257:265], header[148:156] = bytes(8), b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + archive[512:]


def zstd(text: bytes) -> bytes:
    """With a checksum, as the zstd command writes it."""
    module = pytest.importorskip("backports.zstd")
    return module.compress(text, options={module.CompressionParameter.checksum_flag: 1})


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "bzip2": bz2.compress,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "lzma": lambda text: lzma.compress(text, lzma.FORMAT_ALONE),
    "zip": lambda text: zipped(("folder/", b""), ("folder/a.txt", text)),
    "zstd": zstd,
}
NAMES = {"lzma": "xz"}  # both are the lzma module's


SPLITS = ("train", "valid", "test")


def streamed(path: Path) -> bytes:
    with Stream(path) as stream:
        return b"".join(stream.pieces())


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("packer", PACKERS)
def test_the_text_is_what_is_read_whatever_the_name(packer: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", PACKERS[packer](TEXT))
    corpus = data.prepare(path, tmp_path / "corpus")
    assert b"".join(corpus.vocabulary.decode(corpus.split(name)) for name in SPLITS) == TEXT
    assert corpus.source == f"{path} ({NAMES.get(packer, packer)}; split 90/5/5 by bytes)"


@pytest.mark.parametrize("packer", ["bzip2", "gzip", "xz", "zstd"])
def test_several_streams_one_after_the_other(packer: str, tmp_path: Path) -> None:
    """As parallel compressors write them."""
    path = written(tmp_path / "a", PACKERS[packer](TEXT[:500]) + PACKERS[packer](TEXT[500:]))
    assert compressed.read(path).data == TEXT
    assert streamed(path) == TEXT


def test_plain_text_is_left_alone(tmp_path: Path) -> None:
    for head in (b"BZh9 is how bzip2 begins. ", b"PK, said he. ", b"LZIP too. ", b"x" * 257 + b"ustar"):
        path = written(tmp_path / "a.bz2", head + TEXT)
        assert compressed.read(path) == (head + TEXT, "a.bz2", None)
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
    monkeypatch.setattr(rules, "STANDARD_BYTES", 20_000)
    corpus = data.prepare(written(tmp_path / name, content), tmp_path / "corpus")
    assert [len(corpus.split(n)) for n in SPLITS] == [18_000, 1_000, 1_000]
    assert "standard splits" in corpus.source


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


REFUSED: dict[str, tuple[bytes, str]] = {
    "several.zip": (
        zipped(*((f"{n}.txt", TEXT) for n in range(5))),
        r"is an archive of 5 file\(s\) \('0.txt', '1.txt', '2.txt', \.\.\), no names of splits; unpack it first",
    ),
    "empty.zip": (zipped(), r"is an archive of 0 file\(s\) \(\), no names"),
    "encrypted.zip": (encrypted(), "the zip archive is encrypted"),
    "method.zip": (of_unknown_method(), "zip data is truncated or damaged: .*not supported"),
    "a.tar": (tarred(("a.txt", TEXT)), r"is an archive of 1 file\(s\) \('a.txt'\), no names"),
    "old.tar": (of_the_oldest_kind(tarred(("a.txt", TEXT))), r"is an archive of 1 file\(s\)"),
    "a.tar.gz": (tarred(("a.txt", TEXT), mode="w:gz"), r"is an archive of 1 file\(s\)"),
    "a.tar.xz": (tarred(("a.txt", TEXT), mode="w:xz", form=tarfile.PAX_FORMAT), r"is an archive of 1 file\(s\)"),
    "twice.gz": (gzip.compress(bz2.compress(TEXT)), "holds bzip2 data within gzip, not text"),
    "a.7z": (b"7z\xbc\xaf\x27\x1c" + TEXT, "is 7z data, not text"),
    "a.rar": (b"Rar!\x1a\x07\x00" + TEXT, "is rar data, not text"),
    "a.lz4": (b"\x04\x22\x4d\x18" + TEXT, "is lz4 data, not text"),
    "a.Z": (b"\x1f\x9d\x90" + TEXT, "is compress data, not text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    with pytest.raises(TxlError, match=rf"^\S*/{name}: .*{message}"):
        data.prepare(written(tmp_path / name, content), tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_archives_are_no_text_to_read_at_once(tmp_path: Path) -> None:
    for name, message in {
        "several.zip": r"holds 5 files \('0.txt', '1.txt', '2.txt', \.\.\) and not one; unpack it and pass the folder",
        "a.tar": "is tar data, not text; unpack it first",
        "a.tar.gz": "holds tar data within gzip, not text",
    }.items():
        with pytest.raises(TxlError, match=message):
            compressed.read(written(tmp_path / name, REFUSED[name][0]))


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("harm", ["truncated", "damaged"])
def test_broken_files(packer: str, harm: str, tmp_path: Path) -> None:
    whole = PACKERS[packer](random.Random(0).randbytes(4000) + TEXT)
    broken = whole[: len(whole) // 2] if harm == "truncated" else damaged(whole)
    path = written(tmp_path / "a", broken)
    for reading in (compressed.read, streamed):
        with pytest.raises(TxlError, match=rf"its {NAMES.get(packer, packer)} data is truncated or damaged: "):
            reading(path)


@pytest.mark.parametrize("packer", PACKERS)
def test_a_bomb_is_stopped_at_the_limit(packer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "LARGEST_BYTES", 3_000_000)
    path = written(tmp_path / "bomb", PACKERS[packer](b"a" * 3_000_000))
    assert len(compressed.read(path).data) == 3_000_000
    written(path, PACKERS[packer](b"a" * 3_000_001))
    with pytest.raises(TxlError, match=r"holds more than 0.003 GB without its compression; .*pass the plain file"):
        compressed.read(path)
    assert len(streamed(path)) == 3_000_001  # no limit where memory does not grow


def test_zstd_without_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TxlError, match=r"is zstd data, which takes a package: pip install backports\.zstd"):
        compressed.read(written(tmp_path / "a.txt", ZSTD))


def test_zstd_written_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("backports.zstd")
    assert compressed.read(written(tmp_path / "a.txt", ZSTD)).data == b"abc"


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As the shell's <(..) is."""
    reading, writing = os.pipe()
    os.write(writing, gzip.compress(TEXT))
    os.close(writing)
    assert compressed.read(f"/dev/fd/{reading}").data == TEXT
    os.close(reading)


def test_folders_leave_compressed_files_out_and_say_so(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(60):
        (texts / f"{n}.txt").write_text(f"file {n}\n" * (n + 1))
    before = data.prepare(texts, tmp_path / "before")
    small = b"BZh9\x17rE8P\x90abcd"  # without any byte of zero
    written(texts / "a.bz2", small)
    written(texts / "b.tgz", tarred(("a.txt", TEXT), mode="w:gz"))
    after = data.prepare(texts, tmp_path / "after")
    assert after.fingerprint == before.fingerprint
    assert after.source == f"{before.source}; 2 compressed files left out, decompress to include"


def test_a_folder_of_compressed_files(tmp_path: Path) -> None:
    written(tmp_path / "a.bz2", bz2.compress(TEXT))
    with pytest.raises(TxlError, match=r"0 text files found, .*; 1 compressed file left out, decompress to include"):
        data.prepare(tmp_path, tmp_path / "corpus")


def test_a_pipe_is_not_prepared(tmp_path: Path) -> None:
    """It is read more than once."""
    reading, writing = os.pipe()
    os.write(writing, TEXT[:1000])
    os.close(writing)
    with pytest.raises(TxlError, match=rf"^/dev/fd/{reading}: is no regular file; .*write it to one first"):
        data.prepare(f"/dev/fd/{reading}", tmp_path / "corpus")
    os.close(reading)
