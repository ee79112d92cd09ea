"""What is made before: kernels compiled for the device's Triton, wheels for its Python, the commit.

Everything the device's machine needs is in gpu-kit/ afterwards.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_kit.places import ABOUT, CARRIED, ROOT, SCRATCH


def prepare(triton: str, python: str, processes: int) -> int:
    """Everything; 1 if the kernels are not all compiled."""
    begun = time.monotonic()
    shutil.rmtree(CARRIED, ignore_errors=True)
    CARRIED.mkdir(parents=True)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    described = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude", "*"]
    commit = subprocess.run(described, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    site = SCRATCH / f"triton-{triton}"
    if not site.exists():
        part = SCRATCH / "triton.part"
        shutil.rmtree(part, ignore_errors=True)
        _pip(sys.executable, "install", "--no-deps", "--target", str(part), f"triton=={triton}")
        part.rename(site)
    cache = SCRATCH / f"cache-{triton}"
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "tools")])
    env = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gpu_kit", "fill", str(cache), "--processes", str(processes)]
    code = subprocess.run(command, env=env, cwd=ROOT).returncode
    with tempfile.TemporaryDirectory() as elsewhere:
        command[3:5] = ["found", elsewhere]
        code |= subprocess.run(command, env=env | {"TRITON_CACHE_DIR": elsewhere}, cwd=ROOT).returncode
    _pip(sys.executable, "download", "--no-deps", "-d", str(CARRIED), "setuptools>=77")
    no_wheel = wheel(python)
    ABOUT.write_text(json.dumps({"commit": commit, "triton": triton, "no_wheel": no_wheel}, indent=1) + "\n")
    size = sum(x.stat().st_size for x in CARRIED.iterdir()) / 2**20
    names = ", ".join(sorted(x.name for x in CARRIED.iterdir()))
    print(f"{CARRIED}: {size:.1f} MiB in {time.monotonic() - begun:.0f} s: {names}")
    if no_wheel is not None:
        print(f"no wheel, so the device's machine builds: {no_wheel}")
    return code


def fill(cache: Path, processes: int) -> int:
    """Compiles what the calls launch, with the Triton at hand, and packs it; 1 if some failed that
    fit the device."""
    from gpu_kit import caches, cases, dry

    begun = time.monotonic()
    works = [work for number in (1, 2, 3) for work in cases.call(number)]
    done = dry.compile_all(works, processes)
    caches.pack(cache, [*done.found, *done.made], CARRIED, dry.CAPABILITY)
    for name, reason in done.failed.items():
        print(f"not compiled: {name}: {reason}")
    print(f"{len(done.found)} kernels found, {len(done.made)} compiled, {time.monotonic() - begun:.0f} s")
    fits = [reason for reason in done.failed.values() if not reason.startswith("OutOfResources")]
    return 1 if fits else 0


def found(cache: Path, processes: int) -> int:
    """A rehearsal of the device's machine: everything that the calls launch, after unpacking the
    archive into an empty cache; 1 if anything was compiled."""
    from gpu_kit import caches, cases, dry

    reason = caches.adopt(CARRIED, dry.CAPABILITY)
    if reason is not None:
        print(f"carried kernels are not found: {reason}")
        return 1
    caches.unpack(CARRIED, cache)
    bad = 0
    for number in (1, 2, 3):
        done = dry.compile_all(cases.call(number), processes)
        bad += len(done.made)
        print(f"call {number}: {len(done.found)} kernels found in what is carried, {len(done.made)} not")
    return 1 if bad else 0


def wheel(python: str) -> str | None:
    """Builds it with CUDA kernels for sm_90a; why not, or None."""
    if shutil.which(python) is None:
        return f"there is no {python}"
    kept = SCRATCH / f"wheel-{_digest(python)}"
    if not kept.exists():
        env = os.environ | {"TXL_KERNELS_CUDA": "on", "CMAKE_ARGS": "-DCMAKE_CUDA_ARCHITECTURES=90a-real"}
        env.pop("PYTHONPATH", None)
        part = SCRATCH / "wheel.part"
        shutil.rmtree(part, ignore_errors=True)
        command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(part), str(ROOT)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            return (done.stderr.strip() or done.stdout.strip())[-600:]
        part.rename(kept)
    for path in kept.glob("*.whl"):
        shutil.copy(path, CARRIED)
    return None


def _digest(python: str) -> str:
    """Of all that the compiled modules are made from: only they are taken from the wheel."""
    found = hashlib.sha256(python.encode())
    for path in sorted([*(ROOT / "csrc").rglob("*.*"), ROOT / "CMakeLists.txt", ROOT / "setup.py"]):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _pip(python: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", arguments[0], "-q", *arguments[1:]], check=True)
