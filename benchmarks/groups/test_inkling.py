"""Inkling's attention: 24 heads of width 128 on 8 heads of keys and values, position queries of
width 16, and a table of 1,024 distances, beyond which there is no positional term."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from harness.case import Case, Shape
from harness.comparison import Comparison, comparisons
from harness.machine import Machine
from implementations.attention import FLEX_NAME, block_mask, compiled_flex
from implementations.methods import Arguments, Method, Random, compared, graphed

GROUP, WIDTH, EXTENT = 3, 16, 1024  # heads for a head of keys; of position queries; distances with a row
SMALL = Shape(1, 6, 40, 0, 128)
SMALL_DECODE = Shape(1, 6, 3, 1200, 128)  # several parts of keys
WINDOW = 1024
LONGEST_DENSE = 8192


def _arguments(shape: Shape, randn: Random, window: int | None, **settings: Any) -> Arguments:
    B, H, L, M, D = shape
    settings["window"] = window and min(window, 3 * L // 4)
    sizes = {"q": (H, D), "k": (H // GROUP, D), "v": (H // GROUP, D), "q_pos": (H, WIDTH)}
    x = {name: randn(B, L, *size).transpose(1, 2) for name, size in sizes.items()}  # as a model's projections lie
    if M:
        x |= {name: randn(B, H // GROUP, M, D) for name in ("k_mem", "v_mem")}
    return x | {"r": randn(1, min(EXTENT, (M + L) // 2), WIDTH), "position_scale": 1.0, "outside": "zero"} | settings


def _plain(x: Arguments, repeated: bool) -> Tensor:
    """Causal SDPA without positions."""
    q, k, v = x["q"], x["k"], x["v"]
    if repeated:
        k, v = (y.repeat_interleave(GROUP, 1) for y in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeated)


def _cudnn(x: Arguments) -> Tensor:
    """The same by cuDNN's kernels."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _plain(x, repeated=False)


def _dense(x: Arguments) -> Tensor:
    """SDPA with the positional terms as a bias [B, H, L, L], as transformers computes it."""
    length, rows = x["q"].size(2), x["r"].size(1)
    d = torch.arange(length, device=x["q"].device)[:, None] - torch.arange(length, device=x["q"].device)
    profile = x["q_pos"] @ x["r"].mT
    bias = profile.gather(3, d.clamp(0, rows - 1).expand(*profile.shape[:2], -1, -1))
    bias = bias.masked_fill(d >= rows, 0.0).masked_fill((d < 0) | (d >= (x["window"] or length)), -torch.inf)
    k, v = (x[name].repeat_interleave(GROUP, 1) for name in ("k", "v"))
    return scaled_dot_product_attention(x["q"], k, v, bias)


def _flex(x: Arguments) -> Tensor:
    """FlexAttention with its default block sizes, which captures each query's positional terms by
    distance, [B, H, L, rows]."""
    length, rows = x["q"].size(2), x["r"].size(1)
    profile = x["q_pos"] @ x["r"].mT

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = i - j
        return score + torch.where(d < rows, profile[b, h, i, torch.clamp(d, 0, rows - 1)], 0.0)

    mask = block_mask(length, length, x["q"].device, x["window"] or length)
    return compiled_flex()(x["q"], x["k"], x["v"], score_mod=score_mod, block_mask=mask, enable_gqa=True)


def methods(length: int, window: int | None, machine: Machine) -> list[Method]:
    """List the implementations that can compute a causal call, or one with a window."""
    on_gpu = machine.kind == "cuda"
    arguments = functools.partial(_arguments, window=window)
    ours = functools.partial(arguments, backend="triton") if on_gpu else arguments
    found = [Method("ours", ours, "ours")]
    if "cuda" in machine.backends:
        found.append(Method("ours, CUDA C++", functools.partial(arguments, backend="cuda"), "ours"))
    if length <= LONGEST_DENSE:
        found.append(Method("SDPA with dense bias", arguments, "other", _dense))
    if on_gpu:  # on a CPU it has no backward
        found.append(Method(FLEX_NAME, arguments, "other", _flex))
    if window is None:
        found += [
            Method("plain SDPA, enable_gqa", arguments, "baseline", functools.partial(_plain, repeated=False)),
            Method("plain SDPA, keys repeated", arguments, "baseline", functools.partial(_plain, repeated=True)),
        ]
        found += [Method("plain SDPA, cuDNN", arguments, "baseline", _cudnn)] if on_gpu else []
    return found


@comparisons("cpu", "cuda")
def test_inkling(machine: Machine, full: bool) -> list[Comparison]:
    on_gpu = machine.kind == "cuda"
    sizes = (
        [(n, window) for n in (8192, 32768) for window in (None, WINDOW)]
        if on_gpu
        else [(4096 if full else 512 if machine.brief else 2048, None)]
    )
    dtypes = dict.fromkeys((machine.dtype, torch.bfloat16))
    found = []
    for length, window in sizes:
        note = "8 heads of keys, position queries of width 16" + (f", window {window}" if window else "")
        shape = Shape(1, 24, length, 0, 128)
        case = Case(shape=shape, note=note)
        found += compared(
            "Inkling", machine, case, shape, SMALL, methods(length, window, machine), 3 if on_gpu else 6, dtypes=dtypes
        )
    return found


@comparisons("cuda", "interpreter")
def test_decode(machine: Machine, full: bool) -> list[Comparison]:
    """One and four queries beside a long memory, also in CUDA graphs, since the host's time is most
    of a call's."""
    memory_len = 32768 if machine.kind == "cuda" else 48
    found = []
    for length in (1, 4):
        methods = [
            Method(f"ours, {name}", functools.partial(_arguments, window=None, backend=name), "ours")
            for name in machine.decode_backends
        ]
        shape = Shape(1, 24, length, memory_len, 128)
        case = Case(shape=shape, note="8 heads of keys, position queries of width 16")
        for comparison in compared(
            "Inkling", machine, case, shape, SMALL_DECODE, methods, 1.5, directions=("forward",)
        ):
            runs = comparison.implementations
            if machine.kind == "cuda":
                runs = [*runs, *(graphed(x, machine) for x in runs)]
            found.append(replace(comparison, implementations=runs, clock="cold"))
    return found
