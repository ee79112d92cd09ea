"""Files as text: compressed ones and archives are read as what they hold, or refused in one line
that says what they are; pipes are read while somebody writes."""

import bz2
import gzip
import lzma
import os
import random
import sys
import tarfile
import threading
import time
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
    with files.Stream(path) as stream:
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
            files.read(written(tmp_path / name, REFUSED[name][0]))


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("harm", ["truncated", "damaged"])
def test_broken_files(packer: str, harm: str, tmp_path: Path) -> None:
    whole = PACKERS[packer](random.Random(0).randbytes(4000) + TEXT)
    broken = whole[: len(whole) // 2] if harm == "truncated" else damaged(whole)
    path = written(tmp_path / "a", broken)
    for reading in (files.read, streamed):
        with pytest.raises(TxlError, match=rf"its {NAMES.get(packer, packer)} data is truncated or damaged: "):
            reading(path)


@pytest.mark.parametrize("packer", PACKERS)
def test_a_bomb_is_stopped_at_the_limit(packer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 3_000_000)
    path = written(tmp_path / "bomb", PACKERS[packer](b"a" * 3_000_000))
    assert len(files.read(path)) == 3_000_000
    written(path, PACKERS[packer](b"a" * 3_000_001))
    with pytest.raises(TxlError, match=r"holds more than 0.003 GB without its compression; .*pass the plain file"):
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


def test_the_first_tokens_of_a_pipe_that_does_not_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, TEXT[:2000])
    vocabulary = ByteVocabulary(bytes(sorted(set(TEXT))))
    assert vocabulary.decode(encode_file(vocabulary, Path(f"/dev/fd/{reading}"), 100)) == TEXT[:100]
    for end in (reading, writing):
        os.close(end)


def test_zstd_without_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TxlError, match=r"is zstd data, which takes a package: pip install backports\.zstd"):
        files.read(written(tmp_path / "a.txt", ZSTD))


def test_zstd_written_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("backports.zstd")
    assert files.read(written(tmp_path / "a.txt", ZSTD)) == b"abc"


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As the shell's <(..) is."""
    reading, writing = os.pipe()
    os.write(writing, gzip.compress(TEXT))
    os.close(writing)
    assert files.read(f"/dev/fd/{reading}") == TEXT
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


FILES = [
    (f"folder/{name}.txt", random.Random(name).randbytes(3000).hex().encode()) for name in ("train", "valid", "test")
]
ARCHIVES = {
    "zip": zipped(("folder/", b""), *FILES),
    "tar": tarred(*FILES),
    "tar.gz": tarred(*FILES, mode="w:gz"),
    "tar.bz2": tarred(*FILES, mode="w:bz2", form=tarfile.PAX_FORMAT),
    "tar.xz": tarred(*FILES, mode="w:xz"),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_members_in_order(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(ARCHIVES[kind])
    assert [(name, b"".join(pieces)) for name, pieces in files.members(tmp_path / "a")] == FILES
    assert files.names(tmp_path / "a") == [name for name, _ in FILES]


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_truncated_archive_is_one_line(kind: str, tmp_path: Path) -> None:
    whole = ARCHIVES[kind]
    contents = sum(512 + -(-len(content) // 512) * 512 for _, content in FILES)
    cuts = {len(whole) * n // 8 for n in range(1, 8)} | {len(whole) - 1}
    if kind == "tar":  # ending anywhere but in the zeros that follow its last file
        cuts = {cut for cut in cuts if cut < contents} | {512, 512 + 6144, 512 + 6144 + 100, contents}
    for cut in cuts:
        (tmp_path / "a").write_bytes(whole[:cut])
        with pytest.raises(TxlError, match=rf"^{tmp_path}/a: .*truncated or damaged") as raised:
            data.prepare(tmp_path / "a", tmp_path / "c")
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_damaged_header_does_not_end_a_tar_archive(pack: type[bytes], tmp_path: Path) -> None:
    whole = bytearray(ARCHIVES["tar"])
    second = 512 + 6144
    assert whole[second : second + 6] == b"folder"
    whole[second + 150] ^= 0x15
    (tmp_path / "a").write_bytes(pack(bytes(whole)))
    with pytest.raises(TxlError, match="its tar data is truncated or damaged"):
        data.prepare(tmp_path / "a", tmp_path / "c")


def test_encrypted_members(tmp_path: Path) -> None:
    archive = bytearray(ARCHIVES["zip"])
    at = -1
    while (at := archive.find(b"PK\1\2", at + 1)) >= 0:
        archive[at + 8] |= 1
    (tmp_path / "a").write_bytes(archive)
    with pytest.raises(TxlError, match="a: the zip archive is encrypted"):
        data.prepare(tmp_path / "a", tmp_path / "c")


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text")
    assert files.names(tmp_path / "a") is None
    with pytest.raises(TxlError, match="a: is no archive"):
        list(files.members(tmp_path / "a"))


def written_slowly(path: Path, parts: list[bytes]) -> None:
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            file.flush()
            time.sleep(0.3)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    writer = threading.Thread(target=written_slowly, args=(tmp_path / "p", [b"one ", b"two ", b"three"]))
    writer.start()
    assert files.read(tmp_path / "p") == b"one two three"
    writer.join()


def test_a_pipe_that_nobody_writes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.5)
    os.mkfifo(tmp_path / "p")
    with pytest.raises(TxlError, match=r"is a pipe, and nobody wrote to it for 0\.5 seconds"):
        files.read(tmp_path / "p")
    with pytest.raises(TxlError, match="is no regular file"):
        data.prepare(tmp_path / "p", tmp_path / "c")


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_devices(name: str, tmp_path: Path) -> None:
    if not os.path.exists(name):
        pytest.skip(f"{name} is not there")
    with pytest.raises(TxlError, match=r"is a device or a socket|cannot be read"):
        files.read(name)
    with pytest.raises(TxlError):
        data.prepare(name, tmp_path / "c")


def test_pipes_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 10)
    os.mkfifo(tmp_path / "p")
    writer = threading.Thread(target=lambda: (tmp_path / "p").write_bytes(b"x" * 50))
    writer.start()
    with pytest.raises(TxlError, match="a pipe of more than 1e-08 GB"):
        files.read(tmp_path / "p")
    writer.join()


def test_a_split_that_is_a_pipe_is_refused_at_once(corpus: data.Corpus, tmp_path: Path) -> None:
    for path in corpus.folder.iterdir():
        if path.name != "train.bin":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    os.mkfifo(tmp_path / "train.bin")
    with pytest.raises(TxlError, match="the prepared corpus is damaged"):
        data.load(tmp_path)
