"""Text from files, compressed files, archives and pipes, and errors in one line."""

import bz2
import contextlib
import gzip
import lzma
import os
import random
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packed import tarred, zipped

from txl.errors import TxlError
from txl.text import corpus as data
from txl.text import files
from txl.text.preparing import encode_file
from txl.text.vocabulary import ByteVocabulary, WordVocabulary

TEXT = b"".join(b"line %d of a text that is to be read\n" % n for n in range(3000))
BOM = b"\xef\xbb\xbf"
ALL_BYTES = ByteVocabulary(bytes(range(256)))
DAMAGED = "is truncated or damaged: "


def without_magic(archive: bytes) -> bytes:
    """A tar archive in the oldest format, which has no magic bytes."""
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
ONE_FILE = {
    "plain": TEXT,
    **{name: pack(TEXT) for name, pack in PACKERS.items()},
    **{f"{n}, 2 streams": PACKERS[n](TEXT[:500]) + PACKERS[n](TEXT[500:]) for n in ("bzip2", "gzip", "xz")},
    "tar": tarred(("a.txt", TEXT)),
    "tar, oldest": without_magic(tarred(("a.txt", TEXT))),
    **{f"tar.{mode}": tarred(("a.txt", TEXT), mode=f"w:{mode}") for mode in ("bz2", "gz", "xz")},
}
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


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@contextmanager
def pipe(path: Path, content: bytes) -> Iterator[Path]:
    """A named pipe into which a thread writes."""
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    yield path
    writer.join()


@pytest.mark.parametrize("kind", ONE_FILE)
def test_file_and_pipe_of_one_text(kind: str, tmp_path: Path) -> None:
    """The format is recognized by content: every file is named a.txt."""
    path = written(tmp_path / "a.txt", ONE_FILE[kind])
    corpus = data.prepare(path, tmp_path / "corpus")
    splits = (corpus.train, corpus.valid, corpus.test)
    assert b"".join(map(corpus.vocabulary.decode, splits)) == files.read(path) == TEXT
    assert corpus.source == f"{path} (split 90/5/5 by bytes)"
    with pipe(tmp_path / "pipe", ONE_FILE[kind]) as given:
        assert files.read(given) == TEXT


@pytest.mark.parametrize(
    "head", [b"BZh9 is how bzip2 begins. ", b"PK, said he. ", b"LZIP too. ", b"x" * 257 + b"ustar"]
)
def test_text_that_begins_like_another_format(head: bytes, tmp_path: Path) -> None:
    assert files.read(written(tmp_path / "a.bz2", head + TEXT)) == head + TEXT


def encrypted() -> bytes:
    archive = bytearray(zipped(("a.txt", TEXT)))
    archive[6] |= 1  # the flag, in the member's header and in the directory
    archive[archive.index(b"PK\1\2") + 8] |= 1
    return bytes(archive)


NO_TEXT = r"is no text in UTF-8 \(a zero byte at \d+\)"
PACKED = "is compressed data or an archive, not text; unpack it first"
REFUSED: dict[str, tuple[bytes, str]] = {
    "several.zip": (
        zipped(*((f"{n}.txt", TEXT) for n in range(5))),
        r"is an archive of 5 files \('0.txt', '1.txt', '2.txt', \.\.\), no names of splits; unpack it first",
    ),
    "empty.zip": (zipped(), r"is an archive of 0 files \(\), no names"),
    "encrypted.zip": (encrypted(), DAMAGED + ".*encrypted"),
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
    "d.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"pixels" * 99, NO_TEXT),
    "a.bz2": (b"BZh9\x17rE8P\x90abcd", DAMAGED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_files(name: str, tmp_path: Path) -> None:
    """A folder with such a file is refused, too: nothing in it is left out silently."""
    content, message = REFUSED[name]
    with pytest.raises(TxlError, match=rf"^\S*/{name}: .*{message}"):
        data.prepare(written(tmp_path / name, content), tmp_path / "corpus")
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(60):
        written(folder / f"{n}.txt", b"file %d\n" % n * 1000)
    written(folder / name, content)
    with pytest.raises(TxlError, match=rf"^\S*/texts/{name}: "):
        data.prepare(folder, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("kind", ["empty", *ARCHIVES])
def test_archive_of_several_files_is_no_text(kind: str, tmp_path: Path) -> None:
    """The first file is not taken for the text."""
    path = written(tmp_path / "a", ARCHIVES.get(kind, zipped()))
    message = f"a: is an archive of {'no' if kind == 'empty' else 'several'} files; unpack it and pass one of them"
    for reading in (files.read, lambda path: encode_file(ALL_BYTES, path, 20)):
        with pytest.raises(TxlError, match=message):
            reading(path)


@pytest.mark.parametrize("packer", PACKERS)
def test_limit_of_a_text_read_at_once(packer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 3_000_000)
    path = written(tmp_path / "bomb", PACKERS[packer](b"a" * 3_000_000))
    assert len(files.read(path)) == 3_000_000
    written(path, PACKERS[packer](b"a" * 3_000_001))
    with pytest.raises(TxlError, match=r"holds more than 0\.003 GB of text, too much to read at once"):
        files.read(path)
    assert sum(map(len, files.pieces(path))) == 3_000_001  # no limit where memory does not grow


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"x" * 50, "holds more than 1e-08 GB"), (zipped(("a", b"x")), "a pipe of more than 1e-08")],
)
def test_limit_of_a_pipe(content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 10)
    with pipe(tmp_path / "p", content) as path, pytest.raises(TxlError, match=message):
        files.read(path)


@pytest.mark.parametrize("packer", [*PACKERS, "plain"])
@pytest.mark.parametrize("unit", ["bytes", "words"])
def test_first_tokens_need_the_beginning_alone(
    packer: str, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the text is not in the vocabulary, and more than may be read at once."""
    monkeypatch.setattr(files, "LARGEST_BYTES", 1_500_000)
    path = written(tmp_path / "a", PACKERS.get(packer, bytes)(TEXT + b"#" * 3_000_000))
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


def test_first_tokens_of_an_open_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, TEXT[:1000])
    assert encode_file(ALL_BYTES, Path(f"/dev/fd/{reading}"), 900).tobytes() == TEXT[:900]
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("mark", [True, False])
def test_other_encodings_are_refused(encoding: str, mark: bool, tmp_path: Path) -> None:
    """In a file, a pipe, a folder, an archive."""
    plain, text = b"some words\n" * 60, ("\ufeff" * mark + "一些詞\n" * 60).encode(encoding)
    message = (r"is no text in UTF-8 \(the byte-order mark of UTF-16 or UTF-32\)" if mark else NO_TEXT) + ".* iconv"
    splits = {"train.txt": plain, "valid.txt": text, "test.txt": plain}
    written(tmp_path / "a.txt", text)
    written(tmp_path / "a.gz", gzip.compress(text))
    written(tmp_path / "a.zip", zipped(*splits.items()))
    for folder, held in {"named": splits, "dealt": {f"{n}.txt": text if n == 7 else plain for n in range(60)}}.items():
        (tmp_path / folder).mkdir()
        for name, content in held.items():
            written(tmp_path / folder / name, content)
    for source, where in {
        "a.txt": "a.txt", "a.gz": "a.gz", "a.zip": "a.zip: valid.txt", "named": "named/valid.txt",
        "dealt": "dealt/7.txt",
    }.items():  # fmt: skip
        with pytest.raises(TxlError, match=rf"^{tmp_path}/{where}: {message}"):
            data.prepare(tmp_path / source, tmp_path / "corpus")
    with pipe(tmp_path / "p", text) as path, pytest.raises(TxlError, match=message):
        files.read(path)
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_byte_order_mark_of_utf_8_is_left_out(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", piece)
    text = TEXT[:2000]
    for name, pack in {"a": bytes, **PACKERS}.items():
        assert files.read(written(tmp_path / name, pack(BOM + text))) == text
    with pipe(tmp_path / "p", BOM + text) as path:
        assert files.read(path) == text
    assert files.read(written(tmp_path / "mark", BOM)) == b""
    want = data.prepare(written(tmp_path / "plain", text), tmp_path / "c")
    assert data.prepare(tmp_path / "a", tmp_path / "d").fingerprint == want.fingerprint


def test_pipe_is_not_prepared(tmp_path: Path) -> None:
    """A source is read more than once."""
    os.mkfifo(tmp_path / "p")
    with pytest.raises(TxlError, match=r"/p: is no regular file; .*write it to one first"):
        data.prepare(tmp_path / "p", tmp_path / "corpus")


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_devices_are_refused(name: str, tmp_path: Path) -> None:
    if not os.path.exists(name):
        pytest.skip(f"{name} is not there")
    with pytest.raises(TxlError, match=r"is a folder, a device or a socket; a file or a pipe is needed"):
        files.read(name)
    with pytest.raises(TxlError):
        data.prepare(name, tmp_path / "c")


@pytest.mark.parametrize("kind", ARCHIVES)
def test_members_in_order(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a", ARCHIVES[kind])
    assert [(name, b"".join(pieces)) for name, pieces in files.members(path)] == FILES
    assert files.names(path) == [name for name, _ in FILES]
    monkeypatch.setattr(files, "MAX_FILES", 2)
    with pytest.raises(TxlError, match="is an archive of more than 2 files; unpack it first"):
        files.names(path)


@pytest.mark.parametrize("kind", [*PACKERS, *ARCHIVES])
def test_truncated_and_damaged_files(kind: str, tmp_path: Path) -> None:
    whole = PACKERS[kind](FILES[0][1]) if kind in PACKERS and kind != "zip" else ARCHIVES[kind]
    if kind == "tar":  # whose last record is padded
        whole = whole.rstrip(b"\0") + bytes(512)
    broken = [whole[:cut] for cut in {len(whole) * n // 8 for n in range(1, 8)} | {len(whole) - 1}]
    if kind != "tar":  # which has no checksum of its members
        middle = len(whole) // 2
        broken.append(whole[:middle] + bytes(b ^ 0x55 for b in whole[middle : middle + 40]) + whole[middle + 40 :])
    for content in broken:
        with pytest.raises(TxlError, match=rf"^{tmp_path}/a: ({DAMAGED}|{NO_TEXT})") as raised:
            data.prepare(written(tmp_path / "a", content), tmp_path / "c")
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "c").exists()


def test_damaged_tar_header_is_not_the_end(tmp_path: Path) -> None:
    """A damaged or truncated header inside of sound compressed data."""
    whole = tarred(*FILES)
    second = 512 + 6144
    assert whole[second : second + 6] == b"folder"
    damaged = [
        whole[: second + at] + bytes([whole[second + at] ^ 0x15]) + whole[second + at + 1 :]
        for at in range(100, 512, 37)
    ]
    for content in [*damaged, *(whole[:cut] for cut in (512 + 100, second, second + 200, 3 * second))]:
        with pytest.raises(TxlError, match=DAMAGED):
            data.prepare(written(tmp_path / "a", gzip.compress(content)), tmp_path / "c")


def header(kind: bytes, size: int, name: str = "././@LongLink") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, size
    return entry.tobuf(tarfile.GNU_FORMAT)


def sparse(size: int) -> bytes:
    block = bytearray(header(tarfile.GNUTYPE_SPARSE, 0, "train.txt"))
    block[483:495], block[148:156] = b"%011o\0" % size, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


PAX_SPARSE = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
BOMBS: dict[str, tuple[bytes, str]] = {
    name: (header(kind, 16 << 20) + b"a" * (16 << 20), "a header of more than 65,536 bytes")
    for name, kind in {
        "long name": tarfile.GNUTYPE_LONGNAME, "long link": tarfile.GNUTYPE_LONGLINK, "pax": tarfile.XHDTYPE,
        "pax, global": tarfile.XGLTYPE, "pax, Solaris": tarfile.SOLARIS_XHDTYPE,
    }.items()
} | {
    "names without end": ((header(b"L", 1 << 16) + b"a" * (1 << 16)) * 1000, "recursion"),
    "sparse file": (sparse(8 << 30), "'train.txt' is a sparse file"),
    "sparse file, pax": (
        header(b"x", len(PAX_SPARSE)) + PAX_SPARSE.ljust(512, b"\0") + header(b"0", 64 << 20, "train.txt")
        + b"99999999\n" + b"0\n" * (1 << 20), "'train.txt' is a sparse file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_memory_of_tar_headers_is_bounded(name: str, tmp_path: Path) -> None:
    content, message = BOMBS[name]
    path = written(tmp_path / "a", gzip.compress(content + header(b"0", 0, "test.txt") + bytes(1024), 1))
    tracemalloc.start()
    with pytest.raises(TxlError, match=f"{DAMAGED}.*{message}"):
        files.names(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < max(len(content), 16 << 20)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_a_tar_archive(form: int, tmp_path: Path) -> None:
    long = "a" * 90 + "/" + "b" * 1000
    content = random.Random(0).randbytes(3 << 20)
    path = written(tmp_path / "a", tarred((f"{long}.png", content), (long, TEXT), mode="w:gz", form=form))
    assert files.names(path) == [f"{long}.png", long]
    assert [b"".join(text) for name, text in files.members(path) if name == long] == [TEXT]


def test_flipped_bits_of_a_zip_change_no_text(tmp_path: Path) -> None:
    for whole in (zipped(("a.txt", TEXT[:300])), ARCHIVES["zip"]):
        path, generator = written(tmp_path / "a", whole), random.Random(0)
        want = [b"".join(text) for _, text in files.members(path)]
        for _ in range(300):
            altered = bytearray(whole)
            altered[generator.randrange(4, len(whole))] ^= 1 << generator.randrange(8)
            with contextlib.suppress(TxlError):
                assert [b"".join(text) for _, text in files.members(written(path, altered))] == want
