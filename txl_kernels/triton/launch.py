"""From a checked call to kernel launches: sizes, strides, tile configurations, scratch tensors.

Nothing here reads a tensor's values or waits for the device, so calls can be captured in a CUDA graph. What is launched
depends on shapes, strides, dtype and device alone.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from txl_kernels import philox, validate
from txl_kernels.call import Call, empty_like_rows
from txl_kernels.triton import cannot_run, config, interpreted
from txl_kernels.triton.kernels.backward_keys import backward_keys_kernel
from txl_kernels.triton.kernels.backward_queries import backward_queries_kernel
from txl_kernels.triton.kernels.backward_table import backward_table_kernel
from txl_kernels.triton.kernels.forward import forward_kernel, merge_kernel
from txl_kernels.triton.kernels.prepare import prepare_kernel, reach_kernel

LOG2E = 1.4426950408889634
MAX_KEYS = 2**30  # positions are computed in 32 bits
MAX_PARTS = 128
REACH_CELLS = 128
REACH_CHUNK = 32
MERGE_CHUNK = 16


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Programs that should run at once to fill the device; under the interpreter a number that makes tests split."""
    return 8 if interpreted() else int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    return config.INTERPRETER if interpreted() else torch.cuda.get_device_capability(device)


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _strides(x: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if x is None else x.stride()[:axes]


def _describable(x: Tensor) -> bool:
    """Whether the copy engine can take it: 16-byte aligned rows, nothing empty, nothing expanded."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and x.numel() > 0 and all(s > 0 and s % unit == 0 for s in x.stride()[:-1])


def _rows(x: Tensor, first: int, rows: int, plan: "Plan", tma: bool) -> Any:
    """x itself, or its descriptor from row `first` on, which loads blocks of `rows` rows."""
    if not tma:
        return x
    x = x[..., first:, :]
    block = [1] * (x.dim() - 2) + [rows, plan.constants["BLOCK_D"]]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


class Plan(NamedTuple):
    """What every launch of a call shares."""

    B: int
    H: int
    L: int
    M: int
    T: int
    D: int
    k_mem: Tensor  # k's in place of none, of which nothing is read
    v_mem: Tensor
    back: int  # keys seen before a query's own position
    ahead: int  # keys seen from it on
    sign: float
    scale_log2: float
    drop_below: int
    keep_scale: float
    kind: str
    constants: dict[str, Any]
    descriptors: bool  # TMA may be used, as far as k, v, r and the memory decide

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.H, self.L, self.M, self.T

    @property
    def bh(self) -> int:
        return self.B * self.H


def _plan(call: Call) -> Plan:
    batch, heads, length, width = call.q.shape
    memory_len = call.memory_len
    keys = memory_len + length
    if keys > MAX_KEYS:
        raise ValueError(f"triton takes at most {MAX_KEYS} keys, memory and segment, got {keys}")
    back = keys if call.window is None else min(call.window - 1, keys)
    k_mem, v_mem = call.k, call.v
    if call.k_mem is not None and call.v_mem is not None and memory_len and back:
        k_mem, v_mem = call.k_mem, call.v_mem
    rows = (call.q, call.k, call.v, k_mem, v_mem, call.r)
    dropout = call.dropout_p > 0
    kind = config.kind_of(call.q.dtype)
    constants = {
        "D": width,
        "BLOCK_D": max(16, triton.next_power_of_2(width)),
        "DROPOUT": dropout,
        "WIDE": any(x.stride(-2) * 128 >= 2**31 for x in rows),
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
    }
    return Plan(
        batch, heads, length, memory_len, call.r.size(1), width, k_mem, v_mem,
        back=back,
        ahead=1 if call.causal else keys,
        # Kernels see a positive scale and queries of the right sign; a scale of 0 makes all scores 0.
        sign=float((call.scale > 0) - (call.scale < 0)),
        scale_log2=abs(call.scale) * LOG2E if call.scale else 1.0,
        drop_below=philox.drop_threshold(call.dropout_p) - 2**31,
        keep_scale=1.0 / (1.0 - call.dropout_p),
        kind=kind,
        constants=constants,
        # Which keys are hidden by bounds only the bounds know, and a descriptor cannot leave rows out.
        descriptors=config.has_descriptors(capability(call.q.device)) and call.start is None and call.end is None
        and all(_describable(x) for x in rows),
    )  # fmt: skip


def _config(kernel: str, call: Call, plan: Plan, descriptors: bool, atomics: bool = False) -> config.Config:
    crowded = atomics or call.dropout_p > 0
    return config.choose(kernel, capability(call.q.device), plan.kind, plan.constants["BLOCK_D"], descriptors, crowded)


def _options(chosen: config.Config) -> dict[str, int]:
    return {"num_warps": chosen.warps, "num_stages": chosen.stages}


def _check(call: Call) -> None:
    """What pointers rely on. `functional` has checked most of it; the operators can also be called directly."""
    reason = cannot_run(call.q.device, call.q.dtype, call.q.size(-1))
    if reason is not None:
        raise RuntimeError(reason)
    validate.check(call)


class Reach(NamedTuple):
    """First and last query that sees each key, [B, S], and that uses each row of r, [B, T]; None without bounds."""

    key_first: Tensor | None = None
    key_last: Tensor | None = None
    row_first: Tensor | None = None
    row_last: Tensor | None = None


def _reach(call: Call, plan: Plan) -> Reach:
    if call.start is None and call.end is None:
        return Reach()
    keys = plan.M + plan.L
    shapes = ((plan.B, keys), (plan.B, keys), (plan.B, plan.T), (plan.B, plan.T))
    reach = Reach(*(call.q.new_empty(shape, dtype=torch.int32) for shape in shapes))
    reach_kernel[(plan.B, triton.cdiv(max(keys, plan.T), REACH_CELLS))](
        call.start, call.end, *reach, *_strides(call.start, 2), *_strides(call.end, 2), *plan.sizes[1:],
        call.zero_row, plan.back, plan.ahead, CELLS=REACH_CELLS, CHUNK=REACH_CHUNK,
    )  # fmt: skip
    return reach


def parts_of_keys(programs: int, tiles: int, wanted: int) -> int:
    """Parts into which each program's keys are split so that about `wanted` programs run."""
    if programs >= wanted:
        return 1
    return max(1, min(tiles, triton.cdiv(2 * wanted, programs), MAX_PARTS))


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """See `txl_kernels.triton.forward`."""
    _check(call)
    out = empty_like_rows(call.q)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    if call.q.numel() == 0:
        return out, lse
    plan = _plan(call)
    with _on(call.q.device):
        _forward(call, plan, out, lse)
    return out, lse


def _sources(call: Call, plan: Plan, rows: int) -> tuple[Any, ...]:
    """k, v, k_mem, v_mem, r as the kernels that walk keys take them."""
    tma = plan.descriptors
    unseen = max(plan.M - plan.back, 0) if plan.k_mem is call.k_mem else 0
    memory = (_rows(x, unseen, rows, plan, tma) for x in (plan.k_mem, plan.v_mem))
    return (*(_rows(x, 0, rows, plan, tma) for x in (call.k, call.v)), *memory, _rows(call.r, 0, rows, plan, tma))


def _forward(call: Call, plan: Plan, out: Tensor, lse: Tensor) -> None:
    chosen = _config("decode" if plan.L < config.DECODE_LENGTH else "forward", call, plan, plan.descriptors)
    blocks = triton.cdiv(plan.L, chosen.block_m)
    keys_seen = min(plan.M + plan.L, plan.back + plan.ahead + chosen.block_m)
    programs = blocks * plan.bh
    parts = parts_of_keys(programs, triton.cdiv(keys_seen, chosen.block_n), multiprocessors(call.q.device))
    into, into_lse = out, lse
    if parts > 1:
        into = call.q.new_empty((parts, plan.bh, plan.L, plan.D), dtype=torch.float32)
        into_lse = call.q.new_empty((parts, plan.bh, plan.L), dtype=torch.float32)
    out_strides = out.stride()[:3] if parts == 1 else (0, 0, plan.D)
    forward_kernel[(programs, parts)](
        call.q, *_sources(call, plan, chosen.block_n), call.content_bias, call.position_bias,
        call.start, call.end, _reach(call, plan).key_last, call.seed, into, into_lse,
        *call.q.stride()[:3], *call.k.stride()[:3], *call.v.stride()[:3],
        *plan.k_mem.stride()[:3], *plan.v_mem.stride()[:3], *call.r.stride()[:2],
        call.content_bias.stride(0), call.position_bias.stride(0), *_strides(call.start, 2), *_strides(call.end, 2),
        *out_strides, *plan.sizes, call.zero_row, plan.back, plan.ahead, plan.sign, plan.scale_log2, plan.drop_below,
        plan.keep_scale, BM=chosen.block_m, BN=chosen.block_n, SPLIT=parts > 1, TMA=plan.descriptors, **plan.constants, **_options(chosen),
    )  # fmt: skip
    if parts > 1:
        merge_kernel[(plan.bh * plan.L,)](
            into, into_lse, out, lse, *out.stride()[:3], plan.H, plan.L, parts,
            D=plan.D, BLOCK_D=plan.constants["BLOCK_D"], CHUNK=MERGE_CHUNK, num_warps=2,
        )  # fmt: skip


def _check_backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> None:
    for name, x, shape in (
        ("out", out, call.q.shape),
        ("dout", dout, call.q.shape),
        ("lse", lse, call.q.shape[:3]),
        ("dlse", dlse, call.q.shape[:3]),
    ):
        if x is not None and (x.shape != shape or x.device != call.q.device):
            raise ValueError(f"{name} must be {list(shape)} on {call.q.device}, got {list(x.shape)} on {x.device}")
    if out.dtype != call.q.dtype or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError("out and lse must be as the forward operator returned them")


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """See `txl_kernels.triton.backward`."""
    _check(call)
    _check_backward(call, out, lse, dout, dlse)
    dout = dout.to(call.q.dtype)
    if dout.size(-1) > 1 and dout.stride(-1) != 1:
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.float().contiguous()
    grads = [empty_like_rows(x) for x in call[:6]]
    grads += [call.q.new_empty(0) if x is None else empty_like_rows(x) for x in call[6:8]]
    if call.q.numel() == 0:
        return tuple(x.zero_() for x in grads)
    with _on(call.q.device):
        _backward(call, _plan(call), out, lse, dout, dlse, grads)
    return tuple(grads)


def _backward(
    call: Call, plan: Plan, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: list[Tensor]
) -> None:
    dq, dk, dv, dr, du, dw, dk_mem, dv_mem = grads
    if plan.M == 0:
        dk_mem, dv_mem = dk, dv  # of which nothing is written
    like_q = dict(dtype=call.q.dtype, device=call.q.device)
    qu, qw = (torch.empty((plan.bh, plan.L, plan.D), **like_q) for _ in range(2))
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    constants = plan.constants
    wide = constants["WIDE"] or any(x.stride(-2) * 128 >= 2**31 for x in (dout, *grads[:3], dk_mem, dv_mem))
    constants = constants | {"WIDE": wide}
    sizes = {name: constants[name] for name in ("D", "BLOCK_D", "WIDE")}
    block = 64 if not interpreted() else 16
    prepare_kernel[(triton.cdiv(plan.L, block) * plan.bh,)](
        call.q, call.content_bias, call.position_bias, out, dout, lse, dlse, qu, qw, delta, lse2,
        *call.q.stride()[:3], call.content_bias.stride(0), call.position_bias.stride(0), *out.stride()[:3],
        *dout.stride()[:3], plan.H, plan.L, plan.sign, BLOCK=block, **sizes,
    )  # fmt: skip
    reach = _reach(call, plan)
    keys = (call.k, call.v, plan.k_mem, plan.v_mem)
    bounds = (call.start, call.end)
    strides = (
        *call.k.stride()[:3], *call.v.stride()[:3], *plan.k_mem.stride()[:3], *plan.v_mem.stride()[:3],
        *call.r.stride()[:2], *_strides(call.start, 2), *_strides(call.end, 2), *dout.stride()[:3],
    )  # fmt: skip
    tma = plan.descriptors and _describable(dout)
    streamed = (qu.view(call.q.shape), qw.view(call.q.shape), call.r, dout)

    def streams(chosen: config.Config, *which: int) -> list[Any]:
        return [_rows(streamed[x], 0, chosen.block_m, plan, tma) for x in which]

    numbers = (call.zero_row, plan.back, plan.ahead, float(call.scale), plan.scale_log2, plan.drop_below, plan.keep_scale)

    atomics = config.dr_by_atomics()
    chosen = _config("backward_queries", call, plan, plan.descriptors, atomics)
    blocks = triton.cdiv(plan.L, chosen.block_m)
    dq_sum = torch.empty((plan.B, plan.H, blocks, plan.D), dtype=torch.float32, device=call.q.device)
    dr_sum = None
    if atomics:
        dr_sum = torch.zeros((1, plan.H, plan.T, plan.D), dtype=torch.float32, device=call.q.device)
    backward_queries_kernel[(blocks * plan.bh,)](
        qu, qw, *_sources(call, plan, chosen.block_m), *bounds, reach.key_last, reach.row_last, call.seed,
        dout, delta, lse2, dq, dq_sum, dr_sum, *strides, *dq.stride()[:3], *plan.sizes, *numbers,
        BLOCK=chosen.block_m, TMA=plan.descriptors, **constants, **_options(chosen),
    )  # fmt: skip

    chosen = _config("backward_keys", call, plan, tma)
    blocks = triton.cdiv(plan.M, chosen.block_m) + triton.cdiv(plan.L, chosen.block_m)
    du_sum = torch.empty((plan.B, plan.H, blocks, plan.D), dtype=torch.float32, device=call.q.device)
    backward_keys_kernel[(blocks * plan.bh,)](
        *streams(chosen, 0, 1), *keys, *streams(chosen, 2), *bounds, reach.key_first, reach.key_last, call.seed,
        *streams(chosen, 3), delta, lse2, dk, dv, dk_mem, dv_mem, du_sum, *strides, *dk.stride()[:3], *dv.stride()[:3], *dk_mem.stride()[:3], *dv_mem.stride()[:3],
        *plan.sizes, *numbers, BLOCK=chosen.block_m, TMA=tma, **constants, **_options(chosen),
    )  # fmt: skip

    if dr_sum is None:
        chosen = _config("backward_table", call, plan, tma)
        blocks = triton.cdiv(call.zero_row, chosen.block_m) + triton.cdiv(plan.T - call.zero_row, chosen.block_m)
        programs = blocks * plan.H
        parts = max(1, min(plan.B, triton.cdiv(2 * multiprocessors(call.q.device), max(programs, 1))))
        dr_sum = torch.empty((parts, plan.H, plan.T, plan.D), dtype=torch.float32, device=call.q.device)
        if programs:
            backward_table_kernel[(programs, parts)](
                *streams(chosen, 0, 1), *keys, *streams(chosen, 2), *bounds, reach.row_first, reach.row_last, call.seed,
                *streams(chosen, 3), delta, lse2, dr_sum, *strides, plan.B, *plan.sizes, *numbers,
                BLOCK=chosen.block_m, TMA=tma, **constants, **_options(chosen),
            )  # fmt: skip
    dr.copy_(dr_sum[0] if dr_sum.size(0) == 1 else dr_sum.sum(0))
    content = du_sum.sum((0, 2))
    du.copy_(content)
    dw.copy_(dq_sum.sum((0, 2)) - content)  # dq is the sum of what comes through content and through positions
