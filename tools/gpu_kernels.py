"""The Triton kernels of tools/gpu_steps.py, compiled before there is a GPU.

    python tools/gpu_kernels.py fill                   compiles for sm_90 what the steps launch
    python tools/gpu_kernels.py check --widths 64,128  `python -m txl_kernels --check` with these

`fill` needs no GPU and leaves its kernels in TRITON_CACHE_DIR.

Triton names a compiled kernel by its source, arguments, options and environment, and by its own
files. Of those only the compiled library differs between Pythons, so a Triton that differs in
nothing else takes the name of the one that filled the cache.
"""

import contextlib
import hashlib
import importlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pretended_gpu
import torch
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime import cache as triton_cache

from txl_kernels import check_calls
from txl_kernels.backends import self_check, triton

NAME = "triton-key"  # file in the cache's folder with the key of the Triton that filled it
LAUNCHERS_FOR = "GPU_PYTHON"  # environment variable: the device's Python, for which launchers are compiled
WIDTHS = (64, 128)  # of the checks
MULTIPROCESSORS = 132
BENCHMARKS = (
    ("groups.test_attention", "test_decode"), ("groups.test_inkling", "test_inkling"),
    ("groups.test_inkling", "test_decode"),
)  # fmt: skip
MAX_ELEMENTS = 2**28  # of the keys: of longer calls the kernels are the same
Job = Callable[[], object]


def jobs() -> Iterator[Job]:
    """Yield functions that compile what the steps launch on Triton, except the tests."""
    for module, function in BENCHMARKS:
        for title, name in listed(module, function):
            yield partial(compile_benchmark, module, function, title, name)
    for n in range(len(_trials())):
        yield partial(compile_trial, n)


@cache
def _comparisons(module: str, function: str) -> list[Any]:
    """Return a benchmark's comparisons, as on a GPU where Triton is the only backend."""
    from harness.machine import Machine

    machine = Machine("cpu")
    machine.kind, machine.dtype = "cuda", torch.bfloat16
    machine.backends = machine.decode_backends = [triton.NAME]
    found: list[Any] = getattr(importlib.import_module(module), function).comparisons(machine, False)
    return found


def listed(module: str, function: str) -> list[tuple[str, str]]:
    """Return the comparisons' titles with the names of this package's implementations."""
    return [
        (c.title, x.name)
        for c in _comparisons(module, function)
        for x in c.implementations
        if x.role == "ours" and "graph" not in x.name and c.case.shape.elements <= MAX_ELEMENTS
    ]


def compile_benchmark(module: str, function: str, title: str, name: str) -> None:
    """Compile what an implementation of a comparison launches on Triton."""
    comparison = next(x for x in _comparisons(module, function) if x.title == title)
    with compiling():
        next(x for x in comparison.implementations if x.name == name).prepare().run()


def _trials() -> list[check_calls.Trial]:
    """Return the calls of `--check` with head widths of WIDTHS, as if on a GPU."""
    found = check_calls.trials(torch.device("cpu"))
    return [x for x in found if x.kind.head_width in WIDTHS and not x.compiled]


def compile_trial(n: int) -> None:
    """Compile what one call of `--check` launches on Triton, the self-check before it included."""
    trial = _trials()[n]
    kind = trial.kind._replace(backend=triton.NAME)
    with compiling(), mock.patch.object(self_check, "_multiprocessors", return_value=MULTIPROCESSORS):
        exact = [trial.case(), *(self_check.case_of(kind, fills) for fills in (False, True))]
        for at, case in enumerate(exact):
            call = self_check.on_device(case, kind)
            dout, dlse = torch.empty_like(call.q), torch.empty(call.q.shape[:3])
            dout = dout.new_empty((*call.q.shape[:3], call.v.size(3)))
            if at == 0:
                check_calls._run(trial, triton.NAME, call, (dout, dlse))
            else:
                self_check._run(triton, kind, call, (dout, dlse if at == 1 else None))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """A context in which Triton compiles for sm_90 and launches nothing; with GPU_PYTHON also the
    launchers of Triton 3.6, which are C modules of a Python, one for each signature."""
    with_launchers = os.environ.get(LAUNCHERS_FOR) and hasattr(nvidia, "compile_module_from_src")

    def launch(function: Any, kernel: Any, *_: object) -> None:
        if with_launchers:
            _ = kernel.run  # makes the launcher

    with contextlib.ExitStack() as stack:
        stack.enter_context(pretended_gpu.compiling(90, launch, MULTIPROCESSORS))
        stack.enter_context(mock.patch.object(torch.Tensor, "zero_", lambda x: x))
        if with_launchers:
            stack.enter_context(mock.patch.object(nvidia, "compile_module_from_src", compile_launcher))
            stack.enter_context(mock.patch.object(nvidia, "library_dirs", list))
        yield


def compile_launcher(src: str, name: str, **_: Any) -> Any:
    """Replacement of Triton's compile_module_from_src: the module is put into the cache under the
    name that the device's Python looks for, and is not loaded."""
    suffix, include = _suffix_and_headers(os.environ[LAUNCHERS_FOR])
    digest = hashlib.sha256((src + build.platform_key()).encode("utf-8")).hexdigest()
    found = triton_cache.get_cache_manager(digest)
    if found.get_file(f"{name}{suffix}") is None:
        with tempfile.TemporaryDirectory() as folder:
            source, result = Path(folder, f"{name}.c"), Path(folder, f"{name}.so")
            source.write_text(src)
            # A stand-in for the driver's library: only its name is linked.
            stub = ["gcc", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"]
            subprocess.run(stub, check=True)
            command = ["gcc", source, "-O2", "-s", "-shared", "-fPIC", "-Wno-psabi", "-o", result, f"-L{folder}"]
            command += ["-Wl,--no-as-needed", "-l:libcuda.so.1", *(f"-I{x}" for x in (*nvidia.include_dirs, include))]
            subprocess.run(command, check=True)
            found.put(result.read_bytes(), f"{name}{suffix}", binary=True)
    return SimpleNamespace(launch=lambda *arguments: None)


@cache
def _suffix_and_headers(python: str) -> tuple[str, str]:
    """Return the suffix of extension modules and the folder of headers of another Python."""
    code = "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX'), s.get_paths()['include'])"
    suffix, include = subprocess.check_output([python, "-c", code], text=True).split()
    return suffix, include


def _failure(job: Job) -> str | None:
    """Run a job; return its error message, or None."""
    try:
        job()
    except Exception as error:
        return f"{job}: {type(error).__name__}: {error}"[:600]
    return None


def fill() -> int:
    """Compile all that is launched; return 1 if something could not be compiled, else 0."""
    begun, folder = time.monotonic(), Path(os.environ["TRITON_CACHE_DIR"])
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        failed = list(filter(None, pool.imap_unordered(_failure, list(jobs()), chunksize=1)))
    for source in folder.glob("*/*.source"):  # larger than the kernels, and not read again
        source.unlink()
    print(*failed, f"{len(list(folder.glob('*/*.cubin')))} kernels, {time.monotonic() - begun:.0f} s", sep="\n")
    if failed:
        return 1
    (folder / NAME).write_text(triton_cache.triton_key())
    return 0


def fill_for_tests() -> int:
    """Compile what the steps' tests launch on Triton, by running them where nothing is launched."""
    from gpu_steps import TESTS

    given = ["-m", "gpu", "--backends", "triton", "-n", str(os.cpu_count()), *TESTS[1:]]
    env = os.environ | {"GPU_COMPILE_ONLY": "1", self_check.SETTING: "off"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu_plugin", *given]
    return subprocess.run(command, env=env).returncode


def adopt(folder: Path) -> str:
    """Make this process use the kernels cached in `folder`, if its Triton differs from the one that
    compiled them only in the compiled library. Return a message."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted"
    if not (folder / NAME).exists():
        return "no kernels were carried"
    theirs = (folder / NAME).read_text()
    pairs = itertools.zip_longest(triton_cache.triton_key().split("-"), theirs.split("-"))
    different = sum(a != b for a, b in pairs)
    if different > 1:
        return f"carried kernels are of another Triton: {different} of its files differ"
    triton_cache.triton_key = lambda: theirs
    return "carried kernels are used"


def adopt_carried() -> str:
    """`adopt` with the folder of TRITON_CACHE_DIR."""
    return adopt(Path(os.environ.get("TRITON_CACHE_DIR", ".")))


def check(arguments: list[str]) -> int:
    """Run `python -m txl_kernels` with the carried kernels."""
    from txl_kernels.__main__ import main

    print(adopt_carried(), flush=True)
    return main(arguments)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fill"]:
            sys.exit(fill_for_tests() or fill())
        case ["check", *rest]:
            sys.exit(check(["--check", "cuda:0" if torch.cuda.is_available() else "cpu", *rest]))
        case _:
            sys.exit(__doc__)
