"""Implementations of the same attention: inputs, checks, and entries that are ready to be timed."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import Shape
from harness.comparison import Entry, Implementation, Role, require
from harness.internals import cuda_kernels
from harness.machine import Machine
from implementations.original import original_bhls, original_qkbh, position_bhls
from txl_kernels import rel_attention

Inputs = dict[str, Tensor]
Compute = Callable[[Inputs], Tensor]
NAMES = ("q", "k", "v", "r", "content_bias", "position_bias")
SMALL = Shape(2, 2, 70, 90, 64)
LONGEST_EAGER_MASK = 8192


def make_inputs(shape: Shape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Inputs:
    """Make q, k, v [B, H, L, D], r [H, M + L, D], biases [H, D], k_mem, v_mem [B, H, M, D], and
    k_all, v_all, r_all, the layouts that other implementations take (see below)."""
    B, H, L, M, D = shape
    g = torch.Generator(device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device).to(dtype).requires_grad_()

    tensors = {name: randn(B, H, L, D) for name in "qkv"} | {"r": randn(H, M + L, D)}
    tensors |= {name: randn(H, D) for name in ("content_bias", "position_bias")}
    tensors |= {name: randn(B, H, M, D) for name in ("k_mem", "v_mem")}
    # Memory and segment in one tensor, and r in the original's order, so that the other
    # implementations need not copy.
    for name in "kv":
        whole = torch.cat([tensors[f"{name}_mem"], tensors[name]], 2).detach()
        tensors[f"{name}_all"] = whole.requires_grad_()
    return tensors | {"r_all": tensors["r"].detach().flip(1).requires_grad_()}


@dataclass(frozen=True)
class Attention:
    """An implementation of attention; fields as in `Implementation`."""

    name: str
    compute: Compute
    role: Role = "other"


def fused(x: Inputs, backend: str | None = None) -> Tensor:
    return rel_attention(*(x[n] for n in NAMES), (x["k_mem"], x["v_mem"]), backend=backend)


def eager_bhls(x: Inputs) -> Tensor:
    return original_bhls(*(x[n] for n in ("q", "k_all", "v_all", "r_all", "content_bias", "position_bias")))


def compiler() -> None:
    """A context in which too many recompilations raise, instead of a silent return to eager
    code."""
    import torch._dynamo

    if hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True


@functools.cache
def _compiled() -> Attention:
    compiler()
    return torch.compile(eager_bhls, dynamic=False)


def compiled_bhls(x: Inputs) -> Tensor:
    return _compiled()(x)


def eager_qkbh(x: Inputs) -> Tensor:
    """Compute attention in the original's layout; its inputs are permuted views."""
    q, k, v = (t.permute(2, 0, 1, 3) for t in (x["q"], x["k_all"], x["v_all"]))
    return original_qkbh(q, k, v, x["r_all"].transpose(0, 1), x["content_bias"], x["position_bias"]).permute(1, 2, 0, 3)


def dense_bias_sdpa(x: Inputs) -> Tensor:
    """Compute attention by SDPA with the positional scores, [B, H, L, S] with the causal mask, as
    its bias."""
    position = position_bhls(x["q"], x["r_all"], x["position_bias"])
    length, keys = position.shape[-2:]
    hidden = torch.ones(length, keys, dtype=torch.bool, device=position.device).triu(1 + keys - length)
    bias = position.mul_(x["q"].size(-1) ** -0.5).masked_fill(hidden, -torch.inf)
    q = x["q"] + x["content_bias"][:, None]
    return F.scaled_dot_product_attention(q, x["k_all"], x["v_all"], attn_mask=bias)


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiler()
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def block_mask(length: int, keys: int, device: torch.device, window: int) -> Any:
    """Return the causal block mask of `length` queries at the end of the keys, which see `window`
    keys; it is made once for a shape, as a user would."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= keys - length + i) & (keys - length + i - j < window)

    return create_block_mask(seen, None, None, length, keys, device=device, _compile=length > LONGEST_EAGER_MASK)


def flex(x: Inputs) -> Tensor:
    """Compute attention by FlexAttention with its default block sizes, which captures the unshifted
    positional scores. It has no backward on the CPU."""
    if x["q"].device.type == "cpu":
        x = {name: t.detach() for name, t in x.items()}
    q, k = x["q"], x["k_all"]
    length, keys = q.size(2), k.size(2)
    memory_len = keys - length
    shifted_query = (q + x["position_bias"][:, None]) * q.size(-1) ** -0.5
    position = torch.einsum("bhld,hsd->bhls", shifted_query, x["r"]).contiguous()  # by distance

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + position[b, h, i, torch.clamp(memory_len + i - j, min=0)]

    mask = block_mask(length, keys, q.device, keys)
    return compiled_flex()(q + x["content_bias"][:, None], k, x["v_all"], score_mod=score_mod, block_mask=mask)


def cuda_attention(x: Inputs, decode: bool) -> Tensor:
    """Compute attention by the CUDA C++ kernels of decode or of prefill, also where the backend
    takes the others."""
    return cuda_kernels([x[n] for n in (*NAMES, "k_mem", "v_mem")], decode)


def plain_sdpa(x: Inputs) -> Tensor:
    """Compute the baseline without positions and biases: on a GPU over the visible pairs, on a CPU
    over all pairs."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = x["q"], x["k_all"], x["v_all"]
    if q.device.type == "cpu":  # on a CPU a causal bias would be a dense matrix
        return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.size(2), k.size(2)))


def ours(machine: Machine, short: bool = False) -> list[Attention]:
    """Return this package's backends; short: for calls of up to 16 queries without gradients."""
    names = machine.decode_backends if short else machine.backends
    return [rel_attention_on(name) for name in names]


def rel_attention_on(backend: str) -> Attention:
    return Attention(f"rel_attention, {backend}", functools.partial(fused, backend=backend), "ours")


ORIGINAL = Attention("the paper's PyTorch code", eager_qkbh)
EAGER = Attention("the paper's algorithm, [B, H, L, S]", eager_bhls)
COMPILED = Attention("the paper's algorithm, [B, H, L, S], compiled", compiled_bhls)
DENSE = Attention("SDPA with dense bias", dense_bias_sdpa)
FLEX_NAME = "FlexAttention, captured bias, default block sizes"
FLEX = Attention(FLEX_NAME, flex)
CUDA_KERNELS = tuple(
    Attention(
        f"rel_attention, cuda, {name} kernels", functools.partial(cuda_attention, decode=name == "decode"), "part"
    )
    for name in ("decode", "prefill")
)
BASELINE = Attention("baseline: plain SDPA", plain_sdpa, "baseline")
OTHERS = (ORIGINAL, EAGER, COMPILED, DENSE, FLEX, BASELINE)


def split_gradients(inputs: Inputs, out: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Return gradients by this package's argument names, for both layouts of keys and values."""
    grads = torch.autograd.grad(out, list(inputs.values()), dout, allow_unused=True)
    by_name = {name: x for name, x in zip(inputs, grads, strict=True) if x is not None}
    for name in "kv":
        whole = by_name.pop(f"{name}_all", None)
        if whole is not None:
            memory_len = inputs["k_mem"].size(2)
            by_name |= {f"{name}_mem": whole[:, :, :memory_len], name: whole[:, :, memory_len:]}
    reversed_table = by_name.pop("r_all", None)
    return by_name if reversed_table is None else by_name | {"r": reversed_table.flip(1)}


def floats(x: dict[str, Any]) -> Inputs:
    """Return the tensors of floating dtype."""
    return {name: y for name, y in x.items() if isinstance(y, Tensor) and y.is_floating_point()}


def agree(call: Callable[[Any], Tensor], reference: Callable[[Any], Tensor], x: dict[str, Any], backward: bool) -> None:
    """Compare values, and gradients if `backward`, of call(x) with the reference's in float64.

    Raises:
        AssertionError: they differ by more than the bound of the dtype.
    """
    exact = x | {name: y.detach().double().requires_grad_() for name, y in floats(x).items()}
    with torch.set_grad_enabled(backward):
        got, want = call(x), reference(exact)
    require(got, want, "out")
    if backward:
        weight = torch.randn_like(want)
        got_grads = split_gradients(floats(x), got, weight.to(got.dtype))
        for name, gradient in split_gradients(floats(exact), want, weight).items():
            require(got_grads[name], gradient, f"gradient of {name}")


def check(compute: Compute, backward: bool, dtype: torch.dtype, device: torch.device, shape: Shape = SMALL) -> None:
    """Check values, and gradients if `backward`, against the float64 reference, on a small problem
    that takes the same paths through the kernels as `shape`."""
    few = shape.L <= 16  # decode splits the keys into several parts
    batch, heads = (min(shape.B, 8), shape.H) if device.type == "cuda" else (min(shape.B, 2), 2)
    small = Shape(batch, heads, min(shape.L, 70), min(shape.M, 1200 if few else 200), shape.D)
    agree(compute, functools.partial(fused, backend="reference"), make_inputs(small, dtype, device), backward)


def timed(
    attention: Attention,
    machine: Machine,
    shape: Shape,
    backward: bool = False,
    dtype: torch.dtype | None = None,
) -> Implementation:
    """Make an implementation of forward without gradients, or of forward and backward; dtype: None
    for the machine's."""
    prepare = functools.partial(entry, attention, machine, shape, backward, dtype)
    label = None if dtype is None else str(dtype).removeprefix("torch.")
    name = attention.name if label is None else f"{attention.name}, {label}"
    return Implementation(name, prepare, attention.role, label)


def entry(
    attention: Attention, machine: Machine, shape: Shape, backward: bool = False, dtype: torch.dtype | None = None
) -> Entry:
    """Make an entry of an attention with its own inputs and the work that any implementation must
    do."""
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
    if shape.L <= 16:  # bound by reading memory
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
