"""Ways to compute the same attention, and what each must agree with before it is timed."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from agreement import require
from inputs import NAMES, Inputs, Shape, make_inputs
from machine import Machine
from original import original_bhls, original_qkbh, position_bhls
from race import Entry
from torch import Tensor

from txl_kernels import rel_attention

Attention = Callable[[Inputs], Tensor]
SMALL = Shape(2, 2, 70, 90, 64)


def split_gradients(inputs: Inputs, out: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Gradients by the names of ours, whichever form of keys and values a contestant used."""
    grads = torch.autograd.grad(out, list(inputs.values()), dout, allow_unused=True)
    by_name = {name: x for name, x in zip(inputs, grads, strict=True) if x is not None}
    for name in "kv":
        whole = by_name.pop(f"{name}_all", None)
        if whole is not None:
            memory_len = inputs["k_mem"].size(2)
            by_name |= {f"{name}_mem": whole[:, :, :memory_len], name: whole[:, :, memory_len:]}
    reversed_table = by_name.pop("r_all", None)
    return by_name if reversed_table is None else by_name | {"r": reversed_table.flip(1)}


def fused(x: Inputs, backend: str | None = None) -> Tensor:
    return rel_attention(*(x[n] for n in NAMES), (x["k_mem"], x["v_mem"]), backend=backend)


def eager_bhls(x: Inputs) -> Tensor:
    return original_bhls(*(x[n] for n in ("q", "k_all", "v_all", "r_all", "content_bias", "position_bias")))


def compiler() -> None:
    """Too many recompilations are a failure, not a silent return to eager code."""
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
    """In the original's own layout; the inputs are permuted views of it."""
    q, k, v = (t.permute(2, 0, 1, 3) for t in (x["q"], x["k_all"], x["v_all"]))
    return original_qkbh(q, k, v, x["r_all"].transpose(0, 1), x["content_bias"], x["position_bias"]).permute(1, 2, 0, 3)


def dense_bias_sdpa(x: Inputs) -> Tensor:
    """The positional scores, dense, [B, H, L, S], with the causal mask, as SDPA's bias."""
    position = position_bhls(x["q"], x["r_all"], x["position_bias"])
    length, keys = position.shape[-2:]
    hidden = torch.ones(length, keys, dtype=torch.bool, device=position.device).triu(1 + keys - length)
    bias = position.mul_(x["q"].size(-1) ** -0.5).masked_fill(hidden, -torch.inf)
    q = x["q"] + x["content_bias"][:, None]
    return F.scaled_dot_product_attention(q, x["k_all"], x["v_all"], attn_mask=bias)


@functools.cache
def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiler()
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _block_mask(length: int, keys: int, device: torch.device) -> Any:
    """Causal; made once for a shape, as a user would."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: j <= keys - length + i, None, None, length, keys, device=device)


def flex(x: Inputs) -> Tensor:
    """FlexAttention with the positional scores captured, unshifted. It has no backward on the CPU."""
    if x["q"].device.type == "cpu":
        x = {name: t.detach() for name, t in x.items()}
    q, k = x["q"], x["k_all"]
    length, keys = q.size(2), k.size(2)
    memory_len = keys - length
    shifted_query = (q + x["position_bias"][:, None]) * q.size(-1) ** -0.5
    position = torch.einsum("bhld,hsd->bhls", shifted_query, x["r"]).contiguous()  # by distance

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + position[b, h, i, torch.clamp(memory_len + i - j, min=0)]

    mask = _block_mask(length, keys, q.device)
    return _flex()(q + x["content_bias"][:, None], k, x["v_all"], score_mod=score_mod, block_mask=mask)


def plain_sdpa(x: Inputs) -> Tensor:
    """The yardstick, without positions and biases: on a GPU over the visible pairs, on a CPU over all of them."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = x["q"], x["k_all"], x["v_all"]
    if q.device.type == "cpu":  # there a causal bias would be a dense matrix
        return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.size(2), k.size(2)))


def ours(machine: Machine, short: bool = False) -> dict[str, Attention]:
    """Our backends; short: for calls of up to 16 queries without gradients."""
    names = machine.backends_for_few_queries if short else machine.backends
    return {f"rel_attention, {name}": functools.partial(fused, backend=name) for name in names}


ORIGINAL, EAGER, DENSE = "original, [q, k, b, h]", "original, [B, H, L, S]", "SDPA with dense bias"
COMPILED, FLEX, YARDSTICK = f"{EAGER}, compiled", "FlexAttention, captured bias", "yardstick: plain SDPA"
OTHERS: dict[str, Attention] = {
    ORIGINAL: eager_qkbh,
    EAGER: eager_bhls,
    COMPILED: compiled_bhls,
    DENSE: dense_bias_sdpa,
    FLEX: flex,
    YARDSTICK: plain_sdpa,
}


def check(attention: Attention, backward: bool, dtype: torch.dtype, device: torch.device, shape: Shape = SMALL) -> None:
    """Refuses what computes something else, on a problem that takes the same paths through the kernels as `shape`.

    Raises:
        AssertionError: values or, if `backward`, gradients differ from the float64 reference by more than dtype explains.
    """
    few = shape.L <= 16  # then over several parts of the keys
    batch, heads = (min(shape.B, 8), shape.H) if device.type == "cuda" else (min(shape.B, 2), 2)
    small = Shape(batch, heads, min(shape.L, 70), min(shape.M, 1200 if few else 90), shape.D)
    inputs = make_inputs(small, dtype, device)
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    if not backward:
        with torch.no_grad():
            return require(attention(inputs), fused(exact, "reference"), "out")
    got, want = attention(inputs), fused(exact, "reference")
    require(got, want, "out")
    weight = torch.randn(want.shape, dtype=torch.float64, device=device)
    got_grads = split_gradients(inputs, got, weight.to(dtype))
    for name, gradient in split_gradients(exact, want, weight).items():
        require(got_grads[name], gradient, f"gradient of {name}")
    return None


def entry(
    attention: Attention, machine: Machine, shape: Shape, backward: bool = False, dtype: torch.dtype | None = None
) -> Entry:
    """A contestant on its own inputs: forward without gradients, or forward and backward."""
    dtype = dtype or machine.dtype
    inputs = make_inputs(shape, dtype, machine.device)
    dout = torch.randn_like(inputs["q"])

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(inputs)

    def both() -> None:
        torch.autograd.grad(attention(inputs), list(inputs.values()), dout, allow_unused=True)

    run = both if backward else forward
    forward_products, products = (2, 7) if attention is plain_sdpa else (3, 11)
    if shape.L <= 16:  # bound by reading
        tables = (2 * shape.B, 2 * shape.B + 1)
        read = shape.read_bytes(dtype.itemsize) * (tables[0] / tables[1] if attention is plain_sdpa else 1.0)
        work = {"bytes": read}
    else:
        everything = attention is plain_sdpa and machine.kind == "cpu"
        product = shape.dense_product() if everything else shape.product()
        work = {"operations": product * (products if backward else forward_products)}
    if attention is plain_sdpa:
        return Entry(run, **work)
    return Entry(run, functools.partial(check, attention, backward, dtype, machine.device, shape), **work)
