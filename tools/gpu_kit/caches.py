"""Triton's cache of compiled kernels, carried from one machine to another.

A kernel's folder is named by a hash of its source, the arguments it is compiled for, the options,
the environment, ptxas's version and the files of the installed Triton. All but the last are the
same for the same version of Triton on any machine and any Python (its source is hashed as text);
of Triton's files only the compiled library differs between builds for two versions of Python. So a
machine whose Triton differs in that library alone adopts the name of the other's.

The environment counts where a variable that changes code is set at all, also to its default.

Of a folder only what a launch reads is packed: machine code, metadata, and the list of files, whose
absolute paths are rewritten where it is unpacked.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime import cache

ARCHIVE, MANIFEST = "triton-cache.tar.xz", "triton-cache.json"
HERE = "@folder@"  # in place of a kernel's folder in its list of files


def identity(capability: int) -> dict[str, Any]:
    """What names of folders are made of here, beyond the kernels themselves."""
    return {
        "version": triton.__version__,
        "files": cache.triton_key().split("-"),
        "ptxas": hashlib.sha256(get_ptxas_version(capability).encode()).hexdigest(),
        "environment": get_cache_invalidating_env_vars(),
    }


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Why nothing of theirs can be found here; None if it can."""
    for name in ("version", "ptxas", "environment"):
        if ours[name] != theirs[name]:
            return f"Triton's {name} is {ours[name]!r} here and {theirs[name]!r} there"
    pairs = list(zip(ours["files"], theirs["files"], strict=False))
    different = sum(a != b for a, b in pairs)
    if len(ours["files"]) != len(theirs["files"]) or different > 1:
        return f"{different} of Triton's files differ, not its library alone"
    return None


def pack(source: Path, folders: Iterable[str], into: Path, capability: int) -> None:
    """The named folders of the cache `source`, as an archive and its manifest."""
    into.mkdir(parents=True, exist_ok=True)
    folders = sorted(folders)
    with tarfile.open(into / ARCHIVE, "w:xz") as archive:
        for name in folders:
            for path in sorted((source / name).iterdir()):
                if path.suffix not in (".json", ".cubin"):
                    continue
                data = path.read_bytes()
                if path.name.startswith("__grp__"):
                    kept = {
                        x: f"{HERE}/{x}" for x in json.loads(data)["child_paths"] if x.endswith((".json", ".cubin"))
                    }
                    data = json.dumps({"child_paths": kept}).encode()
                entry = tarfile.TarInfo(f"{name}/{path.name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    (into / MANIFEST).write_text(json.dumps({"identity": identity(capability), "kernels": folders}, indent=1) + "\n")


def unpack(carried: Path, into: Path) -> int:
    """Into a cache; how many kernels."""
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(carried / ARCHIVE) as archive:
        archive.extractall(into, filter="data")
    kernels: list[str] = json.loads((carried / MANIFEST).read_text())["kernels"]
    for name in kernels:
        for path in (into / name).glob("__grp__*"):
            path.write_text(path.read_text().replace(HERE, str(into / name)))
    return len(kernels)


def adopt(carried: Path, capability: int) -> str | None:
    """From now on this process looks for kernels under the names that the carried ones have; why
    not, or None."""
    manifest = carried / MANIFEST
    if not manifest.exists():
        return "no cache was carried"
    theirs = json.loads(manifest.read_text())["identity"]
    reason = differences(identity(capability), theirs)
    if reason is None:
        name = "-".join(theirs["files"])
        cache.triton_key = lambda: name
    return reason
