"""Ways to compute the same attention."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from original import original_bhls, original_qkbh, position_bhls
from torch import Tensor

from harness.comparison import Role
from harness.machine import Machine
from implementations.inputs import NAMES, Inputs
from txl_kernels import rel_attention

Compute = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Attention:
    """One of them; its fields are those of an `Implementation`."""

    name: str
    algorithm: str
    compute: Compute
    role: Role = "other"
    backend: str | None = None


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
    """FlexAttention with the positional scores captured, unshifted. It has no backward on the
    CPU."""
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
    """The baseline, without positions and biases: on a GPU over the visible pairs, on a CPU over
    all of them."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = x["q"], x["k_all"], x["v_all"]
    if q.device.type == "cpu":  # there a causal bias would be a dense matrix
        return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.size(2), k.size(2)))


def ours(machine: Machine, short: bool = False) -> list[Attention]:
    """Our backends; short: for calls of up to 16 queries without gradients."""
    names = machine.backends_for_few_queries if short else machine.backends
    return [rel_attention_on(name) for name in names]


def rel_attention_on(backend: str) -> Attention:
    compute = functools.partial(fused, backend=backend)
    return Attention(f"rel_attention, {backend}", "rel_attention", compute, "ours", backend)


ORIGINAL = Attention("the paper's PyTorch code", "original-qkbh", eager_qkbh)
EAGER = Attention("the paper's algorithm, [B, H, L, S]", "original-bhls", eager_bhls)
COMPILED = Attention("the paper's algorithm, [B, H, L, S], compiled", "original-bhls-compiled", compiled_bhls)
DENSE = Attention("SDPA with dense bias", "sdpa-dense-bias", dense_bias_sdpa)
FLEX = Attention("FlexAttention, captured bias", "flex", flex)
BASELINE = Attention("baseline: plain SDPA", "sdpa", plain_sdpa, "baseline")
OTHERS = (ORIGINAL, EAGER, COMPILED, DENSE, FLEX, BASELINE)
