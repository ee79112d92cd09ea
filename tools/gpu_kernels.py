"""The Triton kernels before there is a GPU, and on one.

    python tools/gpu_kernels.py fill    compiles for sm_90 what the benchmarks launch
    python tools/gpu_kernels.py times   microseconds of each kernel, a line of JSON each

`fill` needs no GPU and leaves its kernels in TRITON_CACHE_DIR. `times` also tells the clocks of a
64 x 64 tile of pairs, and times the CUDA C++ kernels and torch's flash and cuDNN SDPA.

Triton names a compiled kernel by its source, arguments, options and environment, and by its own
files. Of those only the compiled library differs between Pythons, so a Triton that differs in
nothing else takes the name of the one that filled the cache.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_card import mhz_under
from pretended_gpu import on_hopper
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic
from triton.runtime import cache

from txl_kernels import rel_attention

NAME = "triton-key"  # file in the cache's folder with the key of the Triton that filled it
WIDTHS = (64, 128)
LENGTHS = (2048, 512, 1024)  # of the segment, and of the memory
KERNELS = {False: ("forward", "backward_queries", "backward_keys"), True: ("backward_queries", "backward_table")}
PROFILED = 5  # number of calls profiled


class Work(NamedTuple):
    """Sizes and options of a causal bfloat16 call. bounded: the second half of the segment is a
    separate document. same_bits: results are bitwise reproducible, as with torch's deterministic
    algorithms."""

    B: int
    H: int
    L: int
    M: int
    D: int
    backward: bool = True
    bounded: bool = False
    dropout_p: float = 0.0
    same_bits: bool = False

    @property
    def tiles(self) -> int:
        """Number of 64 x 64 tiles with a visible pair; L and M must be multiples of 64."""
        rows, columns = self.L // 64, self.M // 64
        return self.B * self.H * (rows * columns + rows * (rows + 1) // 2)


def benchmarked() -> Iterator[Work]:
    """Yield the benchmarks' shapes on a GPU, and the small shapes of their checks."""
    for b, h, n, d in ((8, 16, 2048, 64), (22, 8, 512, 64), (8, 8, 1024, 128), (4, 16, 256, 64)):
        base = Work(b, h, n, n, d)
        yield from (base, base._replace(L=70, M=90, B=min(b, 8)), base._replace(backward=False))
    for d in WIDTHS:
        base = Work(8, 16, 512, 512, d)
        yield from (base._replace(bounded=True), base._replace(dropout_p=0.1), base._replace(same_bits=True))
    yield from (Work(1, 8, 128, 3800, 64), Work(1, 8, 70, 90, 64))
    for b, n, m in itertools.product((1, 8, 64), (1, 2, 4, 8, 16), (800, 1200, 3800, 32768)):
        yield Work(b, 8, n, m, 64, backward=False)


def call_of(work: Work, device: str, backend: str = "triton") -> Callable[[], None]:
    """Return a function that makes the call, with gradients if work.backward. On a CPU, where no
    kernel is launched, tensors are uninitialized."""
    make = partial(torch.empty if device == "cpu" else torch.randn, device=device, dtype=torch.bfloat16)
    B, H, L, M, D = work[:5]
    given = [make(B, H, L, D) for _ in "qkv"] + [make(H, M + L, D), make(H, D), make(H, D)]
    memory, dout = (make(B, H, M, D), make(B, H, M, D)), make(B, H, L, D)
    leaves = [x.requires_grad_(work.backward) for x in (*given, *memory)]
    options: dict[str, Any] = {}
    if work.bounded:
        second = 2 * torch.arange(L, device=device) >= L
        options["start"] = torch.where(second, M + L // 2, 0).int().expand(B, L).contiguous()
    if work.dropout_p:
        options |= {"dropout_p": work.dropout_p, "dropout_seed": torch.tensor([1234], device=device)}

    def run() -> None:
        with same_bits(work.same_bits):
            out: Tensor = rel_attention(*given, memory, backend=backend, **options)
            if work.backward:
                torch.autograd.grad(out, leaves, dout)

    return run


@contextlib.contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """A context with torch's deterministic algorithms if wanted, but without their filling of
    uninitialized memory."""
    before = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = before


def compile_one(work: Work) -> str | None:
    """Compile the kernels of a call into Triton's cache, without a launch; return an error message
    or None."""
    with on_hopper():
        try:
            call_of(work, "cpu")()
        except Exception as error:
            return f"{work}: {type(error).__name__}: {error}"[:400]
    return None


def fill() -> int:
    """Compile all benchmarked calls; return 1 if one could not be compiled, else 0."""
    begun, folder = time.monotonic(), Path(os.environ["TRITON_CACHE_DIR"])
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        failed = list(filter(None, pool.imap_unordered(compile_one, list(benchmarked()), chunksize=1)))
    print(*failed, f"{len(list(folder.glob('*/*.cubin')))} kernels, {time.monotonic() - begun:.0f} s", sep="\n")
    if failed:
        return 1
    (folder / NAME).write_text(cache.triton_key())
    return 0


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


def microseconds(run: Callable[[], None]) -> dict[str, float]:
    """Return the time of each kernel in a call, in microseconds, from the profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    total: Counter[str] = Counter()
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            total[event.name] += event.time_range.elapsed_us() / PROFILED
    return dict(total)


def times() -> int:
    """Print the time of each kernel, and clocks per tile: seconds x clock x number of
    multiprocessors / tiles."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for length, width, fixed in itertools.product(LENGTHS, WIDTHS, (False, True)):
        work = Work(8, 16, length, length, width, same_bits=fixed)
        run = call_of(work, "cuda")
        run()  # compiles the kernels
        us, mhz = microseconds(run), mhz_under(run)
        for kernel in KERNELS[fixed]:
            took = sum(t for name, t in us.items() if name.startswith(f"{kernel}_kernel"))
            name = f"{kernel}, the same bits" if fixed and kernel == "backward_queries" else kernel
            row = {"D": width, "L": length, "kernel": name, "us": round(took, 1), "sm_mhz": mhz}
            row["clocks"] = round(took * mhz * multiprocessors / work.tiles, 1)
            print(json.dumps(row), flush=True)
    for length, width in itertools.product(LENGTHS, WIDTHS):
        for line in others(Work(8, 16, length, length, width)):
            print(json.dumps({"D": width, "L": length} | line), flush=True)
    return 0


def others(work: Work) -> Iterator[dict[str, Any]]:
    """Yield times of the same sizes for the CUDA C++ kernels, and for torch's SDPA without
    positions over the same number of visible pairs: every query of the segment sees all of M + L /
    2 keys. An implementation that does not run yields its error."""
    ways = {"cuda": lambda: call_of(work, "cuda", "cuda")}
    backends = {"flash SDPA": SDPBackend.FLASH_ATTENTION, "cuDNN SDPA": SDPBackend.CUDNN_ATTENTION}
    ways |= {name: partial(sdpa, work, backend) for name, backend in backends.items()}
    for name, make in ways.items():
        try:
            run = make()
            run()
            us = microseconds(run)
        except Exception as error:
            yield {"kernel": name, "why not": f"{type(error).__name__}: {error}"[:200]}
            continue
        for kernel, took in us.items():
            yield {"kernel": f"{name}: {kernel[:80]}", "us": round(took, 1)}
        yield {"kernel": f"{name}, all", "us": round(sum(us.values()), 1), "sm_mhz": mhz_under(run)}


def sdpa(work: Work, backend: Any) -> Callable[[], None]:
    """Return a function that runs torch's SDPA, forward and backward, for L queries and M + L / 2
    keys without a mask."""
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, *kv = (make(work.B, work.H, n, work.D) for n in (work.L, *2 * [work.M + work.L // 2]))
    dout = torch.randn(work.B, work.H, work.L, work.D, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, *kv)
            torch.autograd.grad(out, [q, *kv], dout)

    return run


if __name__ == "__main__":
    if sys.argv[1:] not in (["fill"], ["times"]):
        sys.exit(__doc__)
    if sys.argv[1] == "times":
        print(adopt(Path(os.environ.get("TRITON_CACHE_DIR", "."))), file=sys.stderr)
    sys.exit({"fill": fill, "times": times}[sys.argv[1]]())
