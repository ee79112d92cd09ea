"""From a checked call to forward's launches.

Nothing here reads a tensor's values or waits for the device, so calls can be captured in a CUDA
graph. What is launched depends on the forms of tensors, settings, the device and what `form` takes
from the environment alone, and is laid out once for all calls that are alike in these.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from txl_kernels.backends.triton import config
from txl_kernels.backends.triton.form import addresses_of, environment_of, forms_of
from txl_kernels.backends.triton.kernels.forward import forward_kernel
from txl_kernels.backends.triton.kernels.merge import merge_kernel
from txl_kernels.backends.triton.launch import Launch, Launches
from txl_kernels.backends.triton.launch_arguments import options, shared, strides
from txl_kernels.backends.triton.operands import Workspace
from txl_kernels.backends.triton.plan import make_plan, multiprocessors, once_for_all_alike, operands
from txl_kernels.call import Call
from txl_kernels.call.fields import TENSORS, empty_like_rows

MAX_PARTS = 128
MERGE_CHUNK = 16


def parts_of_keys(programs: int, tiles: int, wanted: int) -> int:
    """Parts into which each program's keys are split so that about twice `wanted` programs run."""
    if programs >= wanted:
        return 1
    return int(max(1, min(tiles, triton.cdiv(2 * wanted, programs), MAX_PARTS)))


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """See `txl_kernels.backends.triton.forward`."""
    q, device = call.q, call.q.device
    out = empty_like_rows(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device)
    if q.numel():
        tensors: list[Any] = [*call[: len(TENSORS)], out, lse]
        addresses = addresses_of(tensors)
        launches = laid_out(device, forms_of(tensors, addresses), call[len(TENSORS) :], environment_of(q.dtype))
        launches.run(device, tensors, addresses)
    return out, lse


@once_for_all_alike
def laid_out(device: torch.device, forms: tuple[Any, ...], settings: tuple[Any, ...], environment: Any) -> Launches:
    """Launches that fill out and lse; in parts of the keys where queries alone leave
    multiprocessors idle.

    forms: of TENSORS, out, lse. The rest as `make_plan` takes it.
    """
    plan = make_plan(device, forms[: len(TENSORS)], settings, environment[0])
    out, lse = operands(forms[len(TENSORS) :], len(TENSORS))
    workspace = Workspace(len(forms))
    chosen = plan.tile("decode" if plan.L < config.DECODE_LENGTH else "forward", plan.descriptors)
    programs = triton.cdiv(plan.L, chosen.block_m) * plan.bh
    keys_seen = min(plan.M + plan.L, plan.back + plan.ahead + chosen.block_m)
    parts = parts_of_keys(programs, triton.cdiv(keys_seen, chosen.block_n), multiprocessors(device))
    into, into_lse, into_strides = out, lse, strides("out", out)
    if parts > 1:
        into = workspace.add(torch.float32, parts, plan.bh, plan.L, plan.D)
        into_lse = workspace.add(torch.float32, parts, plan.bh, plan.L)
        into_strides = {"out_batch": 0, "out_head": 0, "out_row": plan.D}
    q, u, w = plan.call.q, plan.call.content_bias, plan.call.position_bias
    launches = [
        Launch(
            forward_kernel, (programs, parts), Q=q, U=u, W=w, OUT=into, LSE=into_lse, sign=plan.sign,
            **strides("q", q), **strides("u", u), **strides("w", w), **into_strides,
            **plan.sources(chosen.block_n, "V"), **shared(plan), **options(chosen),
            BM=chosen.block_m, BN=chosen.block_n, SPLIT=parts > 1, WIDE=plan.wide, TMA=plan.descriptors,
        )
    ]  # fmt: skip
    if parts > 1:
        merge = Launch(
            merge_kernel, (plan.bh * plan.L,), PARTS=into, PART_LSE=into_lse, OUT=out, LSE=lse, **strides("out", out),
            H=plan.H, L=plan.L, parts=parts, D=plan.D, BLOCK_D=plan.block_d, CHUNK=MERGE_CHUNK, num_warps=2,
        )  # fmt: skip
        launches.append(merge)
    return Launches(launches, workspace)
