"""From a checked call to forward's launches.

Nothing here reads a tensor's values or waits for the device, so calls can be captured in a CUDA
graph. What is launched depends on shapes, strides, dtype and device alone.
"""

import torch
import triton
from torch import Tensor

from txl_kernels.backends.triton import config
from txl_kernels.backends.triton.kernels.forward import forward_kernel
from txl_kernels.backends.triton.kernels.merge import merge_kernel
from txl_kernels.backends.triton.launch_arguments import options, shared, strides
from txl_kernels.backends.triton.plan import Plan, make_plan, multiprocessors, on_device
from txl_kernels.call import Call
from txl_kernels.call.fields import empty_like_rows

MAX_PARTS = 128
MERGE_CHUNK = 16


def parts_of_keys(programs: int, tiles: int, wanted: int) -> int:
    """Parts into which each program's keys are split so that about twice `wanted` programs run."""
    if programs >= wanted:
        return 1
    return int(max(1, min(tiles, triton.cdiv(2 * wanted, programs), MAX_PARTS)))


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """See `txl_kernels.backends.triton.forward`."""
    out = empty_like_rows(call.q)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    if call.q.numel():
        with on_device(call.q.device):
            _launch(call, make_plan(call), out, lse)
    return out, lse


def _launch(call: Call, plan: Plan, out: Tensor, lse: Tensor) -> None:
    """Fills out and lse; in parts of the keys where queries alone leave multiprocessors idle."""
    chosen = plan.tile("decode" if plan.L < config.DECODE_LENGTH else "forward", plan.descriptors)
    programs = triton.cdiv(plan.L, chosen.block_m) * plan.bh
    keys_seen = min(plan.M + plan.L, plan.back + plan.ahead + chosen.block_m)
    parts = parts_of_keys(programs, triton.cdiv(keys_seen, chosen.block_n), multiprocessors(call.q.device))
    into, into_lse, into_strides = out, lse, strides("out", out)
    if parts > 1:
        into = call.q.new_empty((parts, plan.bh, plan.L, plan.D), dtype=torch.float32)
        into_lse = call.q.new_empty((parts, plan.bh, plan.L), dtype=torch.float32)
        into_strides = {"out_batch": 0, "out_head": 0, "out_row": plan.D}
    forward_kernel[(programs, parts)](
        Q=call.q, U=call.content_bias, W=call.position_bias, OUT=into, LSE=into_lse, sign=plan.sign,
        **strides("q", call.q), **strides("u", call.content_bias), **strides("w", call.position_bias), **into_strides,
        **plan.sources(call, chosen.block_n, "V"), **shared(call, plan), **options(chosen),
        BM=chosen.block_m, BN=chosen.block_n, SPLIT=parts > 1, WIDE=plan.wide, TMA=plan.descriptors,
    )  # fmt: skip
    if parts > 1:
        merge_kernel[(plan.bh * plan.L,)](
            PARTS=into, PART_LSE=into_lse, OUT=out, LSE=lse, **strides("out", out), H=plan.H, L=plan.L, parts=parts,
            D=plan.D, BLOCK_D=plan.block_d, CHUNK=MERGE_CHUNK, num_warps=2,
        )  # fmt: skip
