"""Hashes of source files. A compiled module contains the hash of its sources, which is compared
with theirs in a source tree.

CMake runs this file, so it imports nothing of the package.
"""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

_SUFFIXES = (".cpp", ".h", ".cu", ".cuh")
_FOLDERS = {"_native": "cpu", "_cuda": "cuda"}  # the folder in csrc of each module; the other folders belong to both


def source_hash(csrc: Path, name: str) -> str:
    """Return the hash of the names and contents of the sources of module `name`: 16 hexadecimal
    digits."""
    others = {csrc / folder for module, folder in _FOLDERS.items() if module != name}
    found = (file for file in csrc.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    return hash_files(csrc, (file for file in found if others.isdisjoint(file.parents)))


def hash_files(root: Path, files: Iterable[Path]) -> str:
    """Return the hash of files' contents and of their paths under `root`, in any order: 16
    hexadecimal digits."""
    digest = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(source_hash(Path(sys.argv[1]), sys.argv[2]), end="")
