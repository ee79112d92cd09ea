"""Which sources a compiled module is of: baked into it, and compared where the sources lie beside
it.

CMake runs this file, so it imports nothing of the package.
"""

import hashlib
import sys
from pathlib import Path

_SUFFIXES = (".cpp", ".h", ".cu", ".cuh")
_FOLDERS = {"_native": "cpu", "_cuda": "cuda"}  # of each module, in csrc; what is elsewhere both share


def source_hash(csrc: Path, name: str) -> str:
    """Hash of the names and contents of the sources of module `name`: 16 hexadecimal digits."""
    others = {csrc / folder for module, folder in _FOLDERS.items() if module != name}
    digest = hashlib.sha256()
    for file in sorted(csrc.rglob("*")):
        if file.suffix in _SUFFIXES and file.is_file() and others.isdisjoint(file.parents):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(csrc).as_posix()}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(source_hash(Path(sys.argv[1]), sys.argv[2]), end="")
