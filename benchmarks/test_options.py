"""What a window and padding save: the work follows the visible pairs, not the size of the tensors."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from agreement import require
from contestants import entry, ours, split_gradients
from inputs import NAMES, Inputs, Shape, make_inputs
from machine import Machine
from original import shift_both
from race import Entry, Race, races
from torch import Tensor

from txl_kernels import rel_attention

WINDOW = 128


def windowed(x: Inputs, backend: str | None = None, window: int = WINDOW) -> Tensor:
    return rel_attention(*(x[n] for n in NAMES), (x["k_mem"], x["v_mem"]), window=window, backend=backend)


def window(machine: Machine, full: bool) -> list[Race]:
    if machine.kind == "rehearsal":
        return []
    batch, heads = machine.pick(cpu=(1, 8), cuda=(8, 16), rehearsal=(1, 1))
    few, many = (Shape(batch, heads, 512, memory_len, 64) for memory_len in (128, 7680))
    found = []
    for backward in (False, True):
        runs = {}
        for name, attention in ours(machine).items():
            inside = functools.partial(windowed, backend=name.split()[-1])
            for label, call, shape in (
                (f"window {WINDOW} of 640 keys", inside, few),
                (f"window {WINDOW} of 8,192 keys", inside, many),
                ("all 640 keys", attention, few),
            ):
                # Unlike the full call, a window is not what the contestants' check computes: see check_window.
                checked = functools.partial(check_window, call, machine, backward) if call is inside else None
                runs[f"{name}, {label}"] = functools.partial(_timed, call, machine, shape, backward, checked)
        direction = "forward+backward" if backward else "forward"
        found.append(Race("window", f"{direction}, B{batch} H{heads} L512 D64", runs, seconds=3))
    return found


def _timed(call: Any, machine: Machine, shape: Shape, backward: bool, checked: Any) -> Entry:
    made = entry(call, machine, shape, backward)
    return Entry(made.run, checked or made.check)


def check_window(call: Any, machine: Machine, backward: bool) -> None:
    inputs = make_inputs(Shape(1, 2, 70, 200, 64), machine.dtype, machine.device)
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    got, want = call(inputs), windowed(exact, "reference")
    require(got, want, "out")
    if backward:
        weight = torch.randn(want.shape, dtype=torch.float64, device=machine.device)
        found = split_gradients(inputs, got, weight.to(machine.dtype))
        for name, gradient in split_gradients(exact, want, weight).items():
            require(found[name], gradient, f"gradient of {name}")


@races(window)
def test_window(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


# Padding: a batch of utterances in a bidirectional (Conformer) encoder, lengths from a quarter of the longest to all of it.


def padded_inputs(batch: int, heads: int, length: int, width: int, machine: Machine) -> Inputs:
    g = torch.Generator().manual_seed(0)
    sizes = dict.fromkeys("qkv", (batch, heads, length, width)) | {"r": (heads, 2 * length - 1, width)}
    sizes |= {"content_bias": (heads, width), "position_bias": (heads, width)}
    x = {name: torch.randn(*size, generator=g).to(machine.device, machine.dtype) for name, size in sizes.items()}
    lengths = torch.linspace(length / 4, length, batch).round().int()
    return x | {"lengths": lengths.to(machine.device)}


def padded(x: Inputs, backend: str | None = None, told: bool = True) -> Tensor:
    end = x["lengths"][:, None] if told else None
    zero_row = x["q"].size(2) - 1
    return rel_attention(*(x[n] for n in NAMES), causal=False, zero_row=zero_row, end=end, backend=backend)


def _scores(x: Inputs) -> Tensor:
    """Positional scores of a Conformer layer, hidden at padding: [B, H, L, L]."""
    position = shift_both((x["q"] + x["position_bias"][:, None]) @ x["r"].flip(1).mT) * x["q"].size(-1) ** -0.5
    keys = torch.arange(position.size(-1), device=position.device)
    return position.masked_fill(keys >= x["lengths"][:, None, None, None], -torch.inf)


def padded_eager(x: Inputs) -> Tensor:
    content = (x["q"] + x["content_bias"][:, None]) @ x["k"].mT * x["q"].size(-1) ** -0.5
    return (content + _scores(x)).softmax(-1) @ x["v"]


def padded_dense(x: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(x["q"] + x["content_bias"][:, None], x["k"], x["v"], attn_mask=_scores(x))


def padded_plain(x: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(x["q"], x["k"], x["v"])


def padding(machine: Machine, full: bool) -> list[Race]:
    if machine.kind == "rehearsal" or not machine.backends:
        return []
    batch, heads, length = machine.pick(cpu=(8, 4, 512), cuda=(32, 8, 1024), rehearsal=(1, 1, 1))

    def prepare(call: Any, right: bool) -> Entry:
        x = padded_inputs(batch, heads, length, 64, machine)
        run = torch.no_grad()(functools.partial(call, x))
        if not right:
            return Entry(run)

        def check() -> None:
            small = padded_inputs(3, 2, 50, 64, machine)
            exact = {n: t if n == "lengths" else t.double() for n, t in small.items()}
            with torch.no_grad():
                require(call(small), padded(exact, "reference"), "out")

        return Entry(run, check)

    runs = {}
    for name in machine.backends:
        runs[f"rel_attention, {name}"] = functools.partial(prepare, functools.partial(padded, backend=name), True)
        blind = functools.partial(padded, backend=name, told=False)
        runs[f"rel_attention, {name}, not told of padding"] = functools.partial(prepare, blind, False)
    runs["Conformer as commonly written"] = functools.partial(prepare, padded_eager, True)
    runs["SDPA with dense bias"] = functools.partial(prepare, padded_dense, True)
    runs["yardstick: plain SDPA over the padding too"] = functools.partial(prepare, padded_plain, False)
    case = f"bidirectional forward, B{batch} H{heads} L{length} D64, 1/4 to all of it filled"
    return [Race("padding", case, runs, seconds=4)]


@races(padding)
def test_padding(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)
