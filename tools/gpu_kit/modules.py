"""The compiled modules of txl_kernels: out of the wheel that was carried, or built here.

Only they are taken, into the tree beside their sources' Python, which refuses what was compiled
from other C++ sources.
"""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

from gpu_kit.places import CARRIED, MODULES, ROOT, SCRATCH

PACKAGE = ROOT / "txl_kernels"


def provide() -> dict[str, Any]:
    """How they came here. Raises if `_cuda` cannot be loaded either way."""
    reason = from_wheel()
    if reason is None:
        return {"from": "the wheel"}
    build()
    still = missing()
    if still is not None:
        raise RuntimeError(f"{reason}; built here: {still}")
    return {"from": "a build here", "why": reason}


def from_wheel() -> str | None:
    """Why the carried wheel's cannot be used; None if they are."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = next(CARRIED.glob(f"txl_kernels-*-{tag}-*.whl"), None)
    if wheel is None:
        return f"no wheel for {tag} was carried"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with zipfile.ZipFile(wheel) as archive:
        for name in MODULES:
            put(PACKAGE / f"{name}{suffix}", archive.read(f"txl_kernels/{name}{suffix}"))
    return missing()


def put(path: Path, data: bytes) -> None:
    """At once: another process may be reading the old one."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)


def missing() -> str | None:
    """Why the CUDA module cannot be loaded, asked in a process of its own."""
    code = "from txl_kernels.backends import cuda; print(cuda.native.missing or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip()
    return said.splitlines()[-1] if said else None


def build() -> None:
    """With the machine's own compilers and the setuptools that was carried."""
    site = SCRATCH / "setuptools"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--upgrade",
        "--target",
        str(site),
    ]
    subprocess.run([*install, *map(str, CARRIED.glob("setuptools-*.whl"))], check=True)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "TXL_KERNELS_CUDA": "on", "CMAKE_ARGS": "-DCMAKE_CUDA_ARCHITECTURES=90a-real"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | env)
