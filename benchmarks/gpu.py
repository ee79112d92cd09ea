"""Attention on a GPU against everything else, most informative rows first, a record written after each.

    python benchmarks/gpu.py --out gpu.json --seconds 400

Times are medians of CUDA events (triton.testing.do_bench), contestants of a row interleaved in rounds. Every contestant
is compared with the float64 reference on a small problem first; a wrong one gets no time. `--rehearse` runs tiny shapes
on the cpu, in Triton's interpreter, to try the script itself: its times mean nothing.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from original import original_bhls, shift_bhls
from torch import Tensor

import txl_kernels
from txl_kernels import rel_attention, triton
from txl_kernels.triton import config

Inputs = dict[str, Tensor]
ORDER = ("q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem")
ROUNDS = 3


class Bench:
    """Where records go, and when to stop."""

    def __init__(self, out: Path, seconds: float, rehearse: bool) -> None:
        self.out, self.deadline, self.rehearse = out, time.monotonic() + seconds, rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.records: list[dict[str, Any]] = []
        self.about = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": "rehearsal on a cpu" if rehearse else torch.cuda.get_device_name(),
            "torch": torch.__version__, "triton": _version("triton"), "txl_kernels": txl_kernels.__version__,
            "commit": _commit(),
        }  # fmt: skip

    def left(self) -> bool:
        return time.monotonic() < self.deadline

    def add(self, **record: Any) -> None:
        self.records.append(record)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({"about": self.about, "records": self.records}, indent=1) + "\n")
        print(
            "  ".join(f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in record.items()),
            flush=True,
        )

    def milliseconds(self, run: Callable[[], Any]) -> float:
        if self.rehearse:
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        from triton.testing import do_bench

        return float(do_bench(run, warmup=10, rep=40, return_mode="median"))

    def row(self, group: str, shape: tuple[int, ...], contestants: dict[str, Callable[[], Any]], **more: Any) -> None:
        """Times contestants in interleaved rounds; one that fails says so and leaves the others alone."""
        times: dict[str, list[float]] = {name: [] for name in contestants}
        errors: dict[str, str] = {}
        for _ in range(1 if self.rehearse else ROUNDS):
            for name, run in contestants.items():
                if name in errors or not self.left():
                    continue
                try:
                    times[name].append(self.milliseconds(run))
                except Exception as error:
                    errors[name] = f"{type(error).__name__}: {str(error)[:200]}"
                    if not self.rehearse:
                        torch.cuda.empty_cache()
        for name, found in times.items():
            result = {"ms": statistics.median(found), "spread": max(found) - min(found)} if found else {}
            failed = {"error": errors[name]} if name in errors else {}
            if result or failed:
                self.add(group=group, shape="x".join(map(str, shape)), contestant=name, **result, **failed, **more)


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def make_inputs(bench: Bench, shape: tuple[int, ...], grad: bool, dtype: torch.dtype | None = None) -> Inputs:
    B, H, L, M, D = shape
    g = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(bench.device, dtype or bench.dtype).requires_grad_(grad)

    tensors = {name: randn(B, H, L, D) for name in "qkv"} | {"r": randn(H, M + L, D)}
    tensors |= {name: randn(H, D) for name in ("content_bias", "position_bias")}
    tensors |= {name: randn(B, H, M, D) for name in ("k_mem", "v_mem")}
    joined = zip(("keys", "values"), keys_of(tensors), strict=True)  # for those who would have to concatenate
    return tensors | {name: t.detach().requires_grad_(grad) for name, t in joined}


def ours(x: Inputs, backend: str = "triton") -> Tensor:
    return rel_attention(*(x[n] for n in ORDER[:6]), (x["k_mem"], x["v_mem"]), backend=backend)


def keys_of(x: Inputs) -> tuple[Tensor, Tensor]:
    return torch.cat([x["k_mem"], x["k"]], 2), torch.cat([x["v_mem"], x["v"]], 2)


def eager(x: Inputs) -> Tensor:
    return original_bhls(*(x[n] for n in ORDER[:6]), (x["k_mem"], x["v_mem"]))


def plain_sdpa(x: Inputs) -> Tensor:
    """The yardstick: flash attention without positions over the same visible pairs."""
    from torch.nn.attention.bias import causal_lower_right

    k, v = x["keys"], x["values"]
    return F.scaled_dot_product_attention(x["q"], k, v, attn_mask=causal_lower_right(x["q"].size(2), k.size(2)))


def dense_bias_sdpa(x: Inputs) -> Tensor:
    """Positional scores built in full, given to SDPA as its mask."""
    k, v = keys_of(x)
    D, L, S = x["q"].size(-1), x["q"].size(2), k.size(2)
    position = shift_bhls((x["q"] + x["position_bias"].unsqueeze(1)) @ x["r"].flip(1).mT) * D**-0.5
    hidden = torch.ones(L, S, dtype=torch.bool, device=k.device).triu(1 + S - L)
    bias = position.masked_fill(hidden, float("-inf"))
    return F.scaled_dot_product_attention(x["q"] + x["content_bias"].unsqueeze(1), k, v, attn_mask=bias)


_flex: Any = None


def flex(x: Inputs) -> Tensor:
    """FlexAttention with the positional scores captured by its score modifier (their gradient included)."""
    global _flex
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _flex = _flex or torch.compile(flex_attention)
    k, v = keys_of(x)
    D, L, S = x["q"].size(-1), x["q"].size(2), k.size(2)
    M = S - L
    position = (x["q"] + x["position_bias"].unsqueeze(1)) @ x["r"].mT * D**-0.5  # [B, H, L, distances]

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + position[b, h, i, torch.clamp(M + i - j, min=0)]

    mask = create_block_mask(lambda b, h, i, j: j <= M + i, None, None, L, S, device=k.device)
    return _flex(x["q"] + x["content_bias"].unsqueeze(1), k, v, score_mod=score, block_mask=mask)


CONTESTANTS = {
    "ours": ours,
    "plain flash SDPA": plain_sdpa,
    "dense bias SDPA": dense_bias_sdpa,
    "eager": eager,
    "flex": flex,
}


def correct(bench: Bench, name: str) -> bool:
    """Small problem against the float64 reference; the yardstick computes something else by design."""
    if name.startswith("plain"):
        return True
    small = make_inputs(bench, (2, 2, 32, 48, 16) if bench.rehearse else (2, 2, 128, 256, 64), grad=False)
    try:
        got = CONTESTANTS[name](small).double()
    except Exception as error:
        bench.add(group="check", contestant=name, error=f"{type(error).__name__}: {str(error)[:300]}")
        return False
    want = ours({n: t.double() for n, t in small.items()}, "reference")
    error = float((got - want).norm() / want.norm())
    good = error < (1e-5 if bench.dtype == torch.float32 else 2e-2)
    bench.add(group="check", contestant=name, relative_error=error, passed=good)
    return good


def limits(bench: Bench) -> None:
    """What the device itself does: matrix products and copies."""
    n = 256 if bench.rehearse else 8192
    a, b = torch.randn(2, n, n, device=bench.device, dtype=bench.dtype)
    ms = bench.milliseconds(lambda: a @ b)
    bench.add(group="limits", contestant="matrix product", ms=ms, tflops=2 * n**3 / ms / 1e9)
    source = torch.empty(2**16 if bench.rehearse else 2**30, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    ms = bench.milliseconds(lambda: target.copy_(source))
    bench.add(group="limits", contestant="copy", ms=ms, gb_per_s=2 * source.numel() / ms / 1e6)


def attention(bench: Bench, shape: tuple[int, ...], names: list[str]) -> None:
    B, H, L, M, D = shape
    pairs = B * H * (L * M + L * (L + 1) // 2)
    x = make_inputs(bench, shape, grad=False)
    runs = {name: (lambda f=CONTESTANTS[name]: f(x)) for name in names}
    bench.row("forward", shape, runs, gflop=2 * 3 * D * pairs / 1e9)
    x = make_inputs(bench, shape, grad=True)
    leaves, dout = list(x.values()), torch.randn_like(x["q"])

    def both(f: Callable[[Inputs], Tensor]) -> None:
        torch.autograd.grad(f(x), leaves, dout, allow_unused=True)

    runs = {name: (lambda f=CONTESTANTS[name]: both(f)) for name in names}
    bench.row("forward+backward", shape, runs, gflop=2 * 11 * D * pairs / 1e9)


def decode(bench: Bench, shape: tuple[int, ...], names: list[str]) -> None:
    B, H, L, M, D = shape
    x = make_inputs(bench, shape, grad=False)
    runs: dict[str, Callable[[], Any]] = {name: (lambda f=CONTESTANTS[name]: f(x)) for name in names}
    if not bench.rehearse:
        runs["ours, CUDA graph"] = graphed(lambda: ours(x))
    moved = x["q"].element_size() * D * H * (M + L) * (2 * B + 1)
    bench.row("decode", shape, runs, megabytes=moved / 1e6)


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def alternatives(bench: Bench, shape: tuple[int, ...]) -> None:
    """Other tiles, warps and stages than the table's, descriptors or pointers, dr by atomics: what the table should say."""
    x = make_inputs(bench, shape, grad=True)
    leaves, dout = [x[n] for n in ORDER], torch.randn_like(x["q"])
    from txl_kernels.triton import plan

    real_choose, real_describable, real_atomics = config.choose, plan.describable, config.dr_by_atomics
    tiles = [
        (64, 64, 4, 1),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 8, 1),
        (64, 64, 8, 2),
        (32, 32, 4, 2),
        (32, 32, 2, 2),
    ]

    def step() -> None:
        torch.autograd.grad(ours(x), leaves, dout)

    if bench.rehearse:
        tiles = tiles[:1]
    bench.row("alternatives", shape, {"the table's": step})
    try:
        config.dr_by_atomics = lambda: True
        bench.row("alternatives", shape, {"dr by atomics": step})
        config.dr_by_atomics = real_atomics
        plan.describable = lambda x: False
        bench.row("alternatives", shape, {"pointers": step})
        plan.describable = real_describable
        for kernel in ("forward", "backward_queries", "backward_keys", "backward_table"):
            for tile in tiles:
                if not bench.left():
                    return

                def choose(which: str, *rest: Any, kernel: str = kernel, tile: tuple[int, ...] = tile) -> config.Config:
                    return config.Config(*tile) if which == kernel else real_choose(which, *rest)

                config.choose = choose
                bench.row("alternatives", shape, {f"{kernel} {tile}": step})
    finally:
        config.choose, plan.describable, config.dr_by_atomics = real_choose, real_describable, real_atomics


def memory(bench: Bench, shape: tuple[int, ...], name: str) -> None:
    x = make_inputs(bench, shape, grad=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        torch.autograd.grad(CONTESTANTS[name](x).sum(), list(x.values()), allow_unused=True)
        peak: float | str = (torch.cuda.max_memory_allocated() - before) / 2**20
    except torch.OutOfMemoryError:
        peak = "out of memory"
    bench.add(group="memory", shape="x".join(map(str, shape)), contestant=name, peak_mib=peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400.0, help="no new measurement starts after this")
    parser.add_argument("--rehearse", action="store_true")
    a = parser.parse_args()
    if a.rehearse and not triton.interpreted():
        parser.error("--rehearse needs TRITON_INTERPRET=1 in the environment")
    bench = Bench(a.out, a.seconds, a.rehearse)
    limits(bench)
    names = [n for n in CONTESTANTS if n != "flex" and correct(bench, n)]
    if a.rehearse:
        training, decoding, ladder = (1, 1, 32, 32, 16), [(1, 1, 1, 48, 16)], []
    else:
        training, decoding = (8, 16, 1024, 1024, 64), [(1, 8, 1, 3800, 64), (32, 8, 1, 3800, 64), (1, 8, 1, 32768, 64)]
        ladder = [(8, 16, n, n, 64) for n in (512, 2048)] + [(22, 8, 512, 512, 64)]
    without_bias = [n for n in names if n != "dense bias SDPA"]
    steps = [lambda: attention(bench, training, names)]
    steps += [lambda s=shape: decode(bench, s, without_bias) for shape in decoding]
    steps += [lambda s=shape: attention(bench, s, names) for shape in ladder]
    if not a.rehearse:
        steps += [lambda: memory(bench, (1, 8, 32768, 32768, 64), "ours")]
        steps += [lambda n=name: memory(bench, (1, 8, 4096, 4096, 64), n) for name in names]
        steps += [lambda: correct(bench, "flex") and attention(bench, training, ["ours", "flex"])]
        steps += [lambda: attention(bench, (8, 8, 1024, 1024, 128), names)]
        steps += [lambda: attention(bench, (8, 16, 8192, 8192, 64), ["ours", "plain flash SDPA"])]
    steps += [lambda: alternatives(bench, training)]
    for step in steps:
        if bench.left():
            try:
                step()
            except Exception as error:  # the next one may still tell something
                bench.add(group="failed", error=f"{type(error).__name__}: {str(error)[:300]}")
    bench.add(group="end", complete=bench.left())
    if a.rehearse and any("error" in record for record in bench.records):
        raise SystemExit("the rehearsal met errors")


if __name__ == "__main__":
    main()
