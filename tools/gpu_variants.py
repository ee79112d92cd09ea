"""Times of all builds of the CUDA C++ kernels in one process: microseconds of CUDA-graph replays in
turns, and whether their results are the default's.

    python tools/gpu_variants.py gpu-kit/builds [--seconds 60] [--rehearse]

The folder has one for each build, `default` and names of macros (`make gpu-kit`). A line for each
shape and direction is printed as soon as it is known, the goals' shapes first. Beside the builds:
Triton, and SDPA without positions over as many pairs, by cuDNN and FlashAttention-2. --rehearse:
tiny shapes of the CPU backend.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from txl_kernels import prepare, rel_attention
from txl_kernels.backends import cuda, native_modules

Call = Callable[[dict[str, Tensor]], Tensor]
MAX_ERROR = 2e-2  # of the output or a gradient, by norms, relative to the default build's
# Calls: B, H, L, M, D, and whether with Inkling's terms, three query heads on a head of keys.
Shape = tuple[int, int, int, int, int, bool]
SHAPES: list[Shape] = [(8, 16, n, n, d, False) for n, d in ((2048, 128), (512, 64), (2048, 64), (512, 128))]
SHAPES += [(1, 24, 8192, 0, 128, True), (8, 24, 1024, 1024, 64, True)]
TINY: list[Shape] = [(1, 2, 5, 3, 8, False), (1, 3, 5, 0, 8, True)]


def load(folder: Path) -> native_modules.NativeModule:
    """Return the build in a folder, for this Python."""
    with mock.patch.object(native_modules, "PACKAGE", folder):
        found = native_modules.load("_cuda", "CUDA")
    if found.file is None or found.file.parent != folder:
        raise SystemExit(f"{folder}: {found.why_not_loaded or 'no module for this Python'}")
    return found


def use(build: native_modules.NativeModule) -> None:
    """Make the backend run this build from now on."""
    vars(cuda.native).update(vars(build))
    prepare._memo.clear()


def tensors(shape: Shape, device: str) -> dict[str, Tensor]:
    B, H, L, M, D, inkling = shape
    keys = H // 3 if inkling else H
    sizes = {"q": (B, H, L, D), "k": (B, keys, L, D), "v": (B, keys, L, D)}
    sizes |= {"k_mem": (B, keys, M, D), "v_mem": (B, keys, M, D)} if M else {}
    positions = {"r": (H, min(L, 1024), 16), "q_pos": (B, H, L, 16)}
    sizes |= positions if inkling else {"r": (H, M + L, D), "u": (H, D), "w": (H, D)}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return {name: torch.randn(size, device=device, dtype=dtype).requires_grad_() for name, size in sizes.items()}


def ours(x: dict[str, Tensor], backend: str = "cuda") -> Tensor:
    memory = (x["k_mem"], x["v_mem"]) if "k_mem" in x else None
    terms: dict[str, Any] = {"q_pos": x["q_pos"], "position_scale": 1.0, "outside": "zero"} if "q_pos" in x else {}
    given = (x["q"], x["k"], x["v"], x["r"], x.get("u"), x.get("w"), memory)
    return rel_attention(*given, backend=backend, **terms)


def plain(x: dict[str, Tensor], kind: SDPBackend) -> Tensor:
    k, v = (torch.cat([x[f"{n}_mem"], x[n]], 2) if "k_mem" in x else x[n] for n in "kv")
    mask: Any = causal_lower_right(x["q"].size(2), k.size(2)) if "k_mem" in x else None
    with sdpa_kernel(kind):
        return scaled_dot_product_attention(x["q"], k, v, mask, is_causal=mask is None, enable_gqa="q_pos" in x)


def captured(call: Call, x: dict[str, Tensor], both: bool) -> tuple[Callable[[], object], list[Tensor | None]]:
    """Return what repeats a call, and its output and gradients."""

    def run() -> list[Tensor | None]:
        with torch.set_grad_enabled(both):
            out = call(x)
            given = (out, list(x.values()), torch.ones_like(out))
            return [out.detach(), *(torch.autograd.grad(*given, allow_unused=True) if both else ())]

    found = run()
    if not x["q"].is_cuda:
        return run, found
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    return graph.replay, found


def microseconds(replay: Callable[[], object], count: int) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(count):
        replay()
    wait()
    return (time.perf_counter() - begin) * 1e6 / count


def compare(shape: Shape, both: bool, builds: dict[str, Any], calls: dict[str, Call]) -> str:
    """Return a line with the median and minimum time of each call, or why there is none. A call
    named as a build runs it."""
    x, replays, notes = tensors(shape, "cuda" if torch.cuda.is_available() else "cpu"), {}, []
    want: list[Any] = []
    for name, call in calls.items():
        try:
            if name in builds:
                use(builds[name])
            replays[name], found = captured(call, x, both)
        except Exception as error:
            notes.append(f"{name}: {type(error).__name__}: {error}"[:90])
            continue
        if name in builds:
            want = want or [y if y is None else y.double() for y in found]
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, want, strict=True) if b is not None]
            notes += [] if max(errors) < MAX_ERROR else [f"{name}: WRONG by {max(errors):.2g}"]
    counts = {name: max(1, int(4000 / microseconds(replay, 1))) for name, replay in replays.items()}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for name in [*replays] * 9:
        times[name].append(microseconds(replays[name], counts[name]))
    cells = [f"{name} {statistics.median(t):.1f} [{min(t):.1f}]" for name, t in times.items()]
    return f"{'both' if both else 'forward'} {shape}: {', '.join(cells + notes)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="after which nothing is begun")
    parser.add_argument("--rehearse", action="store_true")
    given, begun = parser.parse_args(), time.monotonic()
    folders = sorted(given.builds.resolve().glob("*/"), key=lambda x: (x.name != "default", x.name))
    builds = {"default": cuda.native, "again": cuda.native} if given.rehearse else {x.name: load(x) for x in folders}
    mine = functools.partial(ours, backend="native" if given.rehearse else "cuda")
    calls: dict[str, Call] = dict.fromkeys(builds, mine)
    if not given.rehearse:
        kinds = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
        calls |= {kind.name: functools.partial(plain, kind=kind) for kind in kinds}
        calls["Triton"] = functools.partial(ours, backend="triton")
    for shape in TINY if given.rehearse else SHAPES:
        for both in (True, False):
            if time.monotonic() - begun < given.seconds:
                print(compare(shape, both, builds, calls), flush=True)


if __name__ == "__main__":
    main()
