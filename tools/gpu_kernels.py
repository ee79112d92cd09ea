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
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pretended_gpu
import torch
from torch import Tensor
from torch.utils import deterministic
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, cache

from txl_kernels import check_calls, rel_attention
from txl_kernels.backends import self_check, triton

NAME = "triton-key"  # file in the cache's folder with the key of the Triton that filled it
LAUNCHERS_FOR = "GPU_PYTHON"  # environment variable: the device's Python, for which launchers are compiled
WIDTHS = (64, 128)  # of the checks
MULTIPROCESSORS = 132
# Of Inkling's attention: heads for a head of keys, width of position queries, rows of the table.
GROUP, POSITION_WIDTH, EXTENT = 3, 16, 1024


class Work(NamedTuple):
    """Sizes and options of a causal bfloat16 call. bounded: the second half of the segment is a
    separate document. same_bits: results are bitwise reproducible, as with torch's deterministic
    algorithms. inkling: GROUP heads for each head of keys, and position queries for EXTENT
    distances; then there is no memory."""

    B: int
    H: int
    L: int
    M: int
    D: int
    backward: bool = True
    bounded: bool = False
    dropout_p: float = 0.0
    same_bits: bool = False
    inkling: bool = False
    window: int | None = None


INKLING = [Work(1, 24, n, 0, 128, inkling=True, window=window) for n in (8192, 32768) for window in (None, 1024)]
FEW_QUERIES = [Work(b, 8, n, 3800, 64, backward=False) for b in (1, 8) for n in (1, 2, 4, 8, 16)]


def launched() -> Iterator[Callable[[], str | None]]:
    """Yield functions that compile what the steps launch on Triton, except the tests."""
    for work in (*INKLING, *FEW_QUERIES):
        yield partial(compile_one, work)
    for work in INKLING:
        yield partial(compile_one, work._replace(backward=False))
    for n in range(len(_trials())):
        yield partial(compile_trial, n)


def call_of(work: Work, device: str, backend: str = "triton") -> Callable[[], Any]:
    """Return a function that makes the call, with gradients if work.backward, and returns out and
    the gradients. On a CPU, where no kernel is launched, tensors are uninitialized."""
    given = arguments_of(work, device)
    leaves = [x for x in (*given.values(), *(given.get("memory") or ())) if torch.is_tensor(x) and x.requires_grad]
    dout = torch.empty_like(given["q"]) if device == "cpu" else torch.randn_like(given["q"])

    def run() -> Any:
        with same_bits(work.same_bits), torch.set_grad_enabled(work.backward):
            out: Tensor = rel_attention(**given, backend=backend)
            return (out, *torch.autograd.grad(out, leaves, dout)) if work.backward else (out,)

    return run


def arguments_of(work: Work, device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the arguments of rel_attention."""
    make = partial(torch.empty if device == "cpu" else torch.randn, device=device, dtype=dtype)
    B, H, L, M, D = work[:5]

    def leaf(*shape: int) -> Tensor:
        return make(*shape).requires_grad_(work.backward)

    if work.inkling:  # [B, L, H, D] in memory, as a model's projections lie
        sizes = {"q": (H, D), "k": (H // GROUP, D), "v": (H // GROUP, D), "q_pos": (H, POSITION_WIDTH)}
        given: dict[str, Any] = {
            name: make(B, L, *size).transpose(1, 2).requires_grad_(work.backward) for name, size in sizes.items()
        }
        given["r"] = leaf(1, min(EXTENT, L), POSITION_WIDTH)
        given |= {"position_scale": 1.0, "outside": "zero", "window": work.window}
        return given
    given = {name: leaf(B, H, L, D) for name in "qkv"} | {"r": leaf(H, M + L, D)}
    given |= {name: leaf(H, D) for name in ("content_bias", "position_bias")}
    given["memory"] = (leaf(B, H, M, D), leaf(B, H, M, D))
    if work.bounded:
        second = 2 * torch.arange(L, device=device) >= L
        given["start"] = torch.where(second, M + L // 2, 0).int().expand(B, L).contiguous()
    if work.dropout_p:
        given |= {"dropout_p": work.dropout_p, "dropout_seed": torch.tensor([1234], device=device)}
    return given


@contextlib.contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """A context with torch's deterministic algorithms if wanted, but without their filling of
    uninitialized memory."""
    if not wanted:
        yield
        return
    before = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = before


def compile_one(work: Work) -> str | None:
    """Compile the kernels of a call into Triton's cache, without a launch; return an error message
    or None."""
    with compiling():
        try:
            call_of(work, "cpu")()
        except Exception as error:
            return f"{work}: {type(error).__name__}: {error}"[:400]
    return None


def _trials() -> list[check_calls.Trial]:
    """Return the calls of `--check` with head widths of WIDTHS, as if on a GPU."""
    found = check_calls.trials(torch.device("cpu"))
    return [x for x in found if x.kind.head_width in WIDTHS and not x.compiled]


def compile_trial(n: int) -> str | None:
    """Compile what one call of `--check` launches on Triton, the self-check before it included."""
    trial = _trials()[n]
    kind = trial.kind._replace(backend=triton.NAME)
    with compiling(), mock.patch.object(self_check, "_multiprocessors", return_value=MULTIPROCESSORS):
        try:
            exact = [trial.case(), *(self_check.case_of(kind, fills) for fills in (False, True))]
            for at, case in enumerate(exact):
                call = self_check.on_device(case, kind)
                dout, dlse = torch.empty_like(call.q), torch.empty(call.q.shape[:3])
                dout = dout.new_empty((*call.q.shape[:3], call.v.size(3)))
                if at == 0:
                    check_calls._run(trial, triton.NAME, call, (dout, dlse))
                else:
                    self_check._run(triton, kind, call, (dout, dlse if at == 1 else None))
        except Exception as error:
            return f"{trial}: {type(error).__name__}: {error}"[:400]
    return None


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """A context in which Triton compiles for sm_90 and launches nothing; with GPU_PYTHON also the
    launchers of Triton 3.6, which are C modules of a Python, one for each signature."""
    with_launchers = os.environ.get(LAUNCHERS_FOR) and hasattr(nvidia, "compile_module_from_src")

    def launch(function: Any, kernel: Any, *_: object) -> None:
        if with_launchers:
            _ = kernel.run  # makes the launcher

    with contextlib.ExitStack() as stack:
        stack.enter_context(pretended_gpu.compiling(90, launch))
        stack.enter_context(mock.patch.object(torch.Tensor, "zero_", lambda x: x))
        if with_launchers:
            stack.enter_context(mock.patch.object(nvidia, "compile_module_from_src", compile_launcher))
            stack.enter_context(mock.patch.object(nvidia, "library_dirs", list))
        yield


def compile_launcher(src: str, name: str, **_: Any) -> Any:
    """Replacement of Triton's compile_module_from_src: the module is put into the cache under the
    name that the device's Python looks for, and is not loaded."""
    python = os.environ[LAUNCHERS_FOR]
    suffix, include = _facts_of(python)
    found = cache.get_cache_manager(hashlib.sha256((src + build.platform_key()).encode("utf-8")).hexdigest())
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


_FACTS: dict[str, list[str]] = {}


def _facts_of(python: str) -> list[str]:
    """Return the suffix of extension modules and the folder of headers of another Python."""
    if python not in _FACTS:
        code = "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX'), s.get_paths()['include'])"
        told = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
        _FACTS[python] = told.split()
    return _FACTS[python]


def _call(job: Callable[[], str | None]) -> str | None:
    return job()


def fill() -> int:
    """Compile all that is launched; return 1 if something could not be compiled, else 0."""
    begun, folder = time.monotonic(), Path(os.environ["TRITON_CACHE_DIR"])
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        failed = list(filter(None, pool.imap_unordered(_call, list(launched()), chunksize=1)))
    for source in folder.glob("*/*.source"):  # larger than the kernels, and not read again
        source.unlink()
    print(*failed, f"{len(list(folder.glob('*/*.cubin')))} kernels, {time.monotonic() - begun:.0f} s", sep="\n")
    if failed:
        return 1
    (folder / NAME).write_text(cache.triton_key())
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
    if not (folder / NAME).exists():
        return "no kernels were carried"
    theirs = (folder / NAME).read_text()
    pairs = itertools.zip_longest(cache.triton_key().split("-"), theirs.split("-"))
    different = sum(a != b for a, b in pairs)
    if different > 1:
        return f"carried kernels are of another Triton: {different} of its files differ"
    cache.triton_key = lambda: theirs
    return "carried kernels are used"


def adopt_carried() -> str:
    """`adopt` with the folder of TRITON_CACHE_DIR."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return "kernels are interpreted"
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
