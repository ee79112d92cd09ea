"""An attention ready to be timed: its inputs, its work, and what it must agree with before."""

import functools

import torch
from torch import Tensor

from harness.case import Shape
from harness.checks import require
from harness.comparison import Entry, Implementation
from harness.machine import Machine
from implementations.attention import Attention, Compute, fused
from implementations.inputs import Inputs, make_inputs

SMALL = Shape(2, 2, 70, 90, 64)


def split_gradients(inputs: Inputs, out: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Gradients by the names of ours, whichever form of keys and values an implementation used."""
    grads = torch.autograd.grad(out, list(inputs.values()), dout, allow_unused=True)
    by_name = {name: x for name, x in zip(inputs, grads, strict=True) if x is not None}
    for name in "kv":
        whole = by_name.pop(f"{name}_all", None)
        if whole is not None:
            memory_len = inputs["k_mem"].size(2)
            by_name |= {f"{name}_mem": whole[:, :, :memory_len], name: whole[:, :, memory_len:]}
    reversed_table = by_name.pop("r_all", None)
    return by_name if reversed_table is None else by_name | {"r": reversed_table.flip(1)}


def check(compute: Compute, backward: bool, dtype: torch.dtype, device: torch.device, shape: Shape = SMALL) -> None:
    """Refuses what computes something else, on a problem that takes the same paths through the
    kernels as `shape`.

    Raises:
        AssertionError: values or, if `backward`, gradients differ from the float64 reference by
            more than dtype explains.
    """
    few = shape.L <= 16  # then over several parts of the keys
    batch, heads = (min(shape.B, 8), shape.H) if device.type == "cuda" else (min(shape.B, 2), 2)
    small = Shape(batch, heads, min(shape.L, 70), min(shape.M, 1200 if few else 90), shape.D)
    inputs = make_inputs(small, dtype, device)
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    if not backward:
        with torch.no_grad():
            return require(compute(inputs), fused(exact, "reference"), "out")
    got, want = compute(inputs), fused(exact, "reference")
    require(got, want, "out")
    weight = torch.randn(want.shape, dtype=torch.float64, device=device)
    got_grads = split_gradients(inputs, got, weight.to(dtype))
    for name, gradient in split_gradients(exact, want, weight).items():
        require(got_grads[name], gradient, f"gradient of {name}")
    return None


def timed(
    attention: Attention,
    machine: Machine,
    shape: Shape,
    backward: bool = False,
    dtype: torch.dtype | None = None,
) -> Implementation:
    """Forward without gradients, or forward and backward; dtype: if not the machine's."""
    prepare = functools.partial(entry, attention, machine, shape, backward, dtype)
    name, said = attention.name, None
    if dtype is not None:
        said = str(dtype).removeprefix("torch.")
        name = f"{name}, {said}"
    return Implementation(name, attention.algorithm, prepare, attention.role, attention.backend, said)


def entry(
    attention: Attention, machine: Machine, shape: Shape, backward: bool = False, dtype: torch.dtype | None = None
) -> Entry:
    """An attention on its own inputs, with the work it cannot avoid."""
    dtype = dtype or machine.dtype
    inputs = make_inputs(shape, dtype, machine.device)
    dout = torch.randn_like(inputs["q"])

    def forward() -> Tensor:
        with torch.no_grad():
            return attention.compute(inputs)

    def both() -> None:
        torch.autograd.grad(attention.compute(inputs), list(inputs.values()), dout, allow_unused=True)

    run, plain = both if backward else forward, attention.role == "baseline"
    forward_products, products = (2, 7) if plain else (3, 11)
    if shape.L <= 16:  # bound by reading
        tables = (2 * shape.B, 2 * shape.B + 1)
        read = shape.read_bytes(dtype.itemsize) * (tables[0] / tables[1] if plain else 1.0)
        work = {"bytes": read}
    else:
        everything = plain and machine.kind == "cpu"
        product = shape.dense_product() if everything else shape.product()
        work = {"operations": product * (products if backward else forward_products)}
    if plain:
        return Entry(run, **work)
    return Entry(run, functools.partial(check, attention.compute, backward, dtype, machine.device, shape), **work)
