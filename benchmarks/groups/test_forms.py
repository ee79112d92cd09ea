"""Cost, relative to the plain call, of composed variants from other libraries' attention and of
terms beyond the paper's."""

import functools
from typing import Any

import torch
from torch import Tensor

from harness.case import DIRECTIONS, Case, Shape
from harness.comparison import Comparison, Entry, Implementation, Role, comparisons, require
from harness.machine import Machine
from txl_kernels import rel_attention

SMALL = Shape(2, 2, 12, 7, 8)
WIDER = {"values twice as wide": 2, "values three times as wide": 3}
FORMS = ("plain", "r_descending", "clamp, a table of 65 rows for all heads", "r_bias", "r_bias alone", "softcap",
         *WIDER, "a table for each batch row", "chunks of 64, 4 before", "window", "window and a prefix of 64")  # fmt: skip


def _arguments(form: str, shape: Shape, machine: Machine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the call's tensors that get gradients, and its settings."""
    B, H, L, M, D = shape
    g = torch.Generator(machine.device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=machine.device).to(machine.dtype).requires_grad_()

    wide = WIDER.get(form, 1) * D
    rows = 65 if form.startswith("clamp") else M + 2 * L - 1
    table = (B, H) if form.endswith("each batch row") else (1,) if form.startswith("clamp") else (H,)
    x = {"q": randn(B, H, L, D), "k": randn(B, H, L, D), "v": randn(B, H, L, wide), "r": randn(*table, rows, D)}
    x |= {"k_mem": randn(B, H, M, D), "v_mem": randn(B, H, M, wide)}
    x |= {name: randn(H, D) for name in ("content_bias", "position_bias")}
    if form == "r_bias alone":
        del x["r"], x["position_bias"]
    settings: dict[str, Any] = {"causal": False, "zero_row": 32 if rows == 65 else L - 1}
    if form == "r_descending":
        settings |= {"r_descending": True, "zero_row": M + L - 1}
    elif form.startswith("clamp"):
        settings |= {"outside": "clamp"}
    elif form.startswith("r_bias"):
        x["r_bias"] = randn(H, rows)
    elif form == "softcap":
        settings |= {"softcap": 5.0}
    elif form.startswith("chunks"):
        settings |= {"chunk": (64, 4)}
    elif form.startswith("window"):
        settings |= {"window": (256, 64), "prefix": min(64, M) if form.endswith("64") else 0}
    return x, settings


def _call(x: dict[str, Tensor], settings: dict[str, Any], backend: str | None = None) -> Tensor:
    given = {name: y for name, y in x.items() if name not in ("k_mem", "v_mem")}
    out: Tensor = rel_attention(**{"r": None} | given, memory=(x["k_mem"], x["v_mem"]), backend=backend, **settings)
    return out


def _check(form: str, machine: Machine) -> None:
    x, settings = _arguments(form, SMALL, machine)
    exact = {name: y.detach().double() for name, y in x.items()}
    require(_call(x, settings), _call(exact, settings, "reference"), form)


def _entry(form: str, shape: Shape, machine: Machine, backward: bool) -> Entry:
    x, settings = _arguments(form, shape, machine)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = _call(x, settings)
            if backward:
                for y in x.values():
                    y.grad = None
                out.backward(torch.ones_like(out))

    return Entry(run, functools.partial(_check, form, machine))


@comparisons("cpu", "cuda")
def test_forms(machine: Machine, full: bool) -> list[Comparison]:
    shape = machine.pick(cpu=Shape(4, 8, 512, 512, 64), cuda=Shape(8, 16, 1024, 1024, 64), interpreter=SMALL)
    return _beside_the_plain_call(machine, shape, FORMS)


@comparisons("cpu", "cuda")
def test_wide_values(machine: Machine, full: bool) -> list[Comparison]:
    """Values wider than keys, in Enformer's sizes: 64 columns for keys, 192 for values."""
    shape = machine.pick(cpu=Shape(1, 8, 1536, 0, 64), cuda=Shape(8, 8, 1536, 0, 64), interpreter=SMALL)
    return _beside_the_plain_call(machine, shape, ("plain", *WIDER))


def _beside_the_plain_call(machine: Machine, shape: Shape, forms: tuple[str, ...]) -> list[Comparison]:
    found = []
    for direction in DIRECTIONS:
        backward = direction == "forward+backward"
        runs = []
        for form in forms:
            prepare = functools.partial(_entry, form, shape, machine, backward)
            role: Role = "ours" if form == "plain" else "part"
            runs.append(Implementation(form, prepare, role))
        case = Case(direction=direction, shape=shape, note="bidirectional")
        found.append(Comparison("forms", case, runs, seconds=3))
    return found
