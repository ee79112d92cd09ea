"""Builds for tests in build/tests, which all processes and sessions share."""

import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "tests"


@functools.cache
def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout


def hash_of(paths: Iterable[Path], settings: object, compilers: Iterable[str]) -> str:
    """Return 16 hexadecimal digits of the contents of files and folders, of the repr of settings,
    and of the compilers' versions."""
    found = hashlib.sha256(repr(settings).encode())
    for compiler in compilers:
        found.update(_version(compiler))
    for path in paths:
        files = [path] if path.is_file() else sorted(x for x in path.rglob("*") if x.is_file() and x.suffix != ".pyc")
        for file in files:
            found.update(f"{file.relative_to(ROOT)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def once(name: str, sources: Iterable[Path], settings: object, compiler: str, make: Callable[[Path], object]) -> Path:
    """Return the folder that `make` filled; it is called again if a source, a setting or the
    compiler has changed. sources: every file and folder that `make` reads."""
    digest = hash_of(sources, settings, [compiler])
    folder = KEPT / name / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            for other in folder.parent.iterdir():
                shutil.rmtree(other)
            folder.mkdir()
            make(folder)
            (folder / "complete").touch()
    return folder
