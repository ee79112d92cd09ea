"""Time saved by telling which keys are padding: the work depends on the visible pairs, not on the
tensor sizes."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import Case, Shape
from harness.comparison import Comparison, Entry, Implementation, comparisons, require
from harness.limits import arithmetic
from harness.machine import Machine
from implementations.attention import DENSE, NAMES, Compute, Inputs
from implementations.original import shift_both
from txl_kernels import rel_attention


def padded_inputs(batch: int, heads: int, length: int, width: int, machine: Machine) -> Inputs:
    """Make q, k, v [B, H, L, D], r [H, 2 L - 1, D], biases [H, D] and int32 lengths [B] from L / 4
    to L."""
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
    """Compute a Conformer layer's positional scores [B, H, L, L], -inf at padding."""
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


def check_padded(call: Compute, machine: Machine) -> None:
    """Check an implementation against the float64 reference that gets the lengths."""
    small = padded_inputs(3, 2, 50, 64, machine)
    exact = {n: t if n == "lengths" else t.double() for n, t in small.items()}
    with torch.no_grad():
        require(call(small), padded(exact, "reference"), "out")


@comparisons("cpu", "cuda")
def test_padding(machine: Machine, full: bool) -> list[Comparison]:
    """A padded batch with lengths from a quarter of the longest to all of it."""
    batch, heads, length = machine.pick(cpu=(8, 4, 512), cuda=(32, 8, 1024), interpreter=(1, 1, 1))

    def prepare(call: Compute, right: bool, products: int = 3) -> Entry:
        inputs = padded_inputs(batch, heads, length, 64, machine)
        run = torch.no_grad()(functools.partial(call, inputs))
        work = products * 2.0 * heads * 64 * length * float(inputs["lengths"].sum())  # only keys that are not padding
        return Entry(run, functools.partial(check_padded, call, machine) if right else None, operations=work)

    runs = []
    for backend in machine.backends:
        told = functools.partial(prepare, functools.partial(padded, backend=backend), True)
        blind = functools.partial(prepare, functools.partial(padded, backend=backend, told=False), False)
        runs.append(Implementation(f"rel_attention, {backend}", told, "ours"))
        runs.append(Implementation(f"rel_attention, {backend}, not told of padding", blind, "part"))
    runs += [
        Implementation("Conformer as commonly written", functools.partial(prepare, padded_eager, True)),
        Implementation(DENSE.name, functools.partial(prepare, padded_dense, True)),
        Implementation(
            "baseline: plain SDPA over the padding too",
            functools.partial(prepare, padded_plain, False, 2),
            "baseline",
        ),
        arithmetic(machine),
    ]
    shape = Shape(batch, heads, length, 0, 64)
    case = Case(direction="forward", shape=shape, note="bidirectional, 1/4 to all of it filled")
    return [Comparison("padding", case, runs, seconds=4)]
