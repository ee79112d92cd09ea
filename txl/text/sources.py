"""Where text comes from: a file, a folder, enwik8, text8, or Python's own standard library."""

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

from txl.errors import TxlError
from txl.paths import AnyPath
from txl.text import compressed

_STANDARD_BYTES = 100_000_000  # enwik8, text8: first 90M, next 5M, last 5M bytes
_LEAST_BYTES = 60  # so that each of 90/5/5 gets some


class Splits(NamedTuple):
    """Raw bytes of the three splits, and a line on where they come from."""

    train: bytes
    valid: bytes
    test: bytes
    source: str


def read(source: AnyPath | None) -> Splits:
    """Reads a source and splits it.

    Args:
        source: None for the standard library of this interpreter; a file, plain or compressed (see
            `compressed.read`), cut 90/5/5 by bytes (enwik8 and text8 at their standard places); or
            a folder, whose text files are dealt out 90/5/5. Its compressed files are left out.

    Raises:
        TxlError: nothing there, no text in it, too little to split, or not to be decompressed.
    """
    if source is None:
        return _folder(Path(sysconfig.get_paths()["stdlib"]), "the Python standard library", only=".py")
    source = Path(source)
    if (source / "corpus.json").is_file():
        raise TxlError(f"{source}: is a prepared corpus already; pass the text it was made from")
    if source.is_dir():
        return _folder(source, str(source))
    if not source.exists():
        raise TxlError(f"{source}: no such file or folder")
    return _file(source)


def _file(path: Path) -> Splits:
    data, name, compression = compressed.read(path)
    if not data:
        raise TxlError(f"{path}: the file is empty")
    if len(data) < _LEAST_BYTES:
        raise TxlError(f"{path}: {len(data)} bytes are too few to split 90/5/5; at least {_LEAST_BYTES} are needed")
    names = {path.name.split(".")[0], name.split(".")[0]}  # of a zip, the archive's or its member's
    standard = bool(names & {"enwik8", "text8"}) and len(data) == _STANDARD_BYTES
    twentieth = 5_000_000 if standard else len(data) // 20
    cut = len(data) - 2 * twentieth
    how = f"{compression}; " if compression else ""
    how += "standard splits" if standard else "split 90/5/5 by bytes"
    return Splits(data[:cut], data[cut : cut + twentieth], data[cut + twentieth :], f"{path} ({how})")


def _is_text(data: bytes) -> bool:
    return b"\0" not in data[:8192] and bool(data.strip())


def _left_out(count: int) -> str:
    if not count:
        return ""
    return f"; {count} compressed file{'s' if count > 1 else ''} left out, decompress to include"


def _folder(folder: Path, name: str, only: str | None = None) -> Splits:
    """Text files in an order that depends on their paths alone, each to the split most behind."""
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"} if only else set()
    texts: list[tuple[str, bytes]] = []
    compressed_files = 0
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if (only and path.suffix != only) or skipped & set(relative.parts) or path.is_symlink() or not path.is_file():
            continue
        try:
            data = path.read_bytes()
        except OSError:
            continue  # an unreadable file among readable ones is not the corpus's problem
        if compressed.compression(data):
            compressed_files += 1
        elif _is_text(data):
            texts.append((relative.as_posix(), data if data.endswith(b"\n") else data + b"\n"))
    left_out = _left_out(compressed_files)
    if len(texts) < 3:
        found = f"{len(texts)} text files found, at least 3 are needed (train, valid, test)"
        raise TxlError(f"{folder}: {found}{left_out}")
    texts.sort(key=lambda item: hashlib.sha256(os.fsencode(item[0])).digest())
    shares, sizes = (0.90, 0.05, 0.05), [0, 0, 0]
    parts: list[list[bytes]] = [[], [], []]
    total = sum(len(data) for _, data in texts)
    # By hash, since largest first would starve the small splits of variety.
    for _, data in texts:
        missing = [share * total - size for share, size in zip(shares, sizes, strict=True)]
        into = max(range(3), key=lambda i: missing[i] / shares[i])
        parts[into].append(data)
        sizes[into] += len(data)
    if not all(sizes):
        raise TxlError(f"{folder}: its files are too few or too uneven to deal out 90/5/5; pass one file instead")
    train, valid, test = (b"".join(p) for p in parts)
    return Splits(train, valid, test, f"{name}, {len(texts)} files dealt out 90/5/5{left_out}")
