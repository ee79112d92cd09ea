"""From a checked call to kernel launches.

Nothing here reads a tensor's values or waits for the device, so calls can be captured in a CUDA graph. What is launched
depends on shapes, strides, dtype and device alone.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from txl_kernels.backends.triton import config, interpreted
from txl_kernels.backends.triton.kernels.backward_keys import backward_keys_kernel
from txl_kernels.backends.triton.kernels.backward_queries import backward_queries_kernel
from txl_kernels.backends.triton.kernels.backward_table import backward_table_kernel
from txl_kernels.backends.triton.kernels.forward import forward_kernel, merge_kernel
from txl_kernels.backends.triton.kernels.prepare import prepare_kernel, reach_kernel
from txl_kernels.backends.triton.plan import Plan, capability, describable, make_plan, multiprocessors, wide
from txl_kernels.call import Call
from txl_kernels.call.fields import empty_gradients, empty_like_rows

MAX_PARTS = 128
REACH_CELLS, REACH_CHUNK = 128, 32
MERGE_CHUNK = 16


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _steps(*tensors: Tensor) -> list[int]:
    """Strides of all axes but the last, one tensor after the other."""
    return [step for x in tensors for step in x.stride()[:-1]]


def _bound_steps(*bounds: Tensor | None) -> list[int]:
    return [step for x in bounds for step in ((0, 0) if x is None else x.stride())]


def _config(kernel: str, call: Call, plan: Plan, descriptors: bool, atomics: bool = False) -> config.Config:
    crowded = atomics or call.dropout_p > 0
    return config.choose(kernel, capability(call.q.device), plan.kind, plan.block_d, descriptors, crowded)


def _options(chosen: config.Config) -> dict[str, int]:
    return {"num_warps": chosen.warps, "num_stages": chosen.stages}


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
    widths = (keys, keys, plan.T, plan.T)
    reach = Reach(*(call.q.new_empty((plan.B, width), dtype=torch.int32) for width in widths))
    reach_kernel[(plan.B * triton.cdiv(max(keys, plan.T), REACH_CELLS),)](
        call.start, call.end, *reach, *_bound_steps(call.start, call.end), *plan.sizes[1:],
        plan.zero_row, plan.back, plan.ahead, CELLS=REACH_CELLS, CHUNK=REACH_CHUNK,
    )  # fmt: skip
    return reach


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
        with _on(call.q.device):
            _forward(call, make_plan(call), out, lse)
    return out, lse


def _forward(call: Call, plan: Plan, out: Tensor, lse: Tensor) -> None:
    chosen = _config("decode" if plan.L < config.DECODE_LENGTH else "forward", call, plan, plan.descriptors)
    programs = triton.cdiv(plan.L, chosen.block_m) * plan.bh
    keys_seen = min(plan.M + plan.L, plan.back + plan.ahead + chosen.block_m)
    parts = parts_of_keys(programs, triton.cdiv(keys_seen, chosen.block_n), multiprocessors(call.q.device))
    into, into_lse, steps = out, lse, _steps(out)
    if parts > 1:
        into = call.q.new_empty((parts, plan.bh, plan.L, plan.D), dtype=torch.float32)
        into_lse = call.q.new_empty((parts, plan.bh, plan.L), dtype=torch.float32)
        steps = [0, 0, plan.D]
    biases = (call.content_bias, call.position_bias)
    forward_kernel[(programs, parts)](
        call.q, *plan.sources(call, chosen.block_n), *biases, call.start, call.end, _reach(call, plan).key_last,
        call.seed, into, into_lse,
        *_steps(call.q, call.k, call.v, plan.k_mem, plan.v_mem, plan.r, *biases), *_bound_steps(call.start, call.end),
        *steps, *plan.sizes, plan.zero_row, plan.back, plan.ahead, plan.sign, plan.scale_log2, plan.drop_below,
        plan.keep_scale, BM=chosen.block_m, BN=chosen.block_n, SPLIT=parts > 1, TMA=plan.descriptors,
        **plan.constants, **_options(chosen),
    )  # fmt: skip
    if parts > 1:
        merge_kernel[(plan.bh * plan.L,)](
            into, into_lse, out, lse, *_steps(out), plan.H, plan.L, parts,
            D=plan.D, BLOCK_D=plan.block_d, CHUNK=MERGE_CHUNK, num_warps=2,
        )  # fmt: skip


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """See `txl_kernels.backends.triton.backward`."""
    grads = empty_gradients(call)
    if call.q.numel() == 0:
        return tuple(x.zero_() for x in grads)
    with _on(call.q.device):
        _Backward(call, make_plan(call), out, lse, dout, dlse).run(grads)
    return grads


class _Backward:
    """The kernels of one backward call, and the tensors they share."""

    def __init__(self, call: Call, plan: Plan, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> None:
        self.call, self.plan, self.dout = call, plan, dout
        self.qu = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
        self.qw = torch.empty_like(self.qu)
        self.delta, self.lse2 = torch.empty_like(lse), torch.empty_like(lse)
        self.tma = plan.descriptors and describable(dout) and describable(self.qu)
        self.reach = _reach(call, plan)
        self.steps = _steps(call.k, call.v, plan.k_mem, plan.v_mem, plan.r)
        self.steps += _bound_steps(call.start, call.end) + _steps(dout)
        self.numbers = (
            plan.zero_row, plan.back, plan.ahead, float(call.scale), plan.scale_log2, plan.drop_below, plan.keep_scale
        )  # fmt: skip
        block, biases = 32 if interpreted() else 64, (call.content_bias, call.position_bias)
        prepare_kernel[(triton.cdiv(plan.L, block) * plan.bh,)](
            call.q, *biases, out, dout, lse, dlse, self.qu, self.qw, self.delta, self.lse2,
            *_steps(call.q, *biases, out, dout), plan.H, plan.L, plan.sign, BLOCK=block, D=plan.D, BLOCK_D=plan.block_d,
            WIDE=wide(call.q, out, dout),
        )  # fmt: skip

    def run(self, grads: Sequence[Tensor]) -> None:
        """Fills the gradients, in the order of Call's first eight fields."""
        dq, dk, dv, dr, du, dw, dk_mem, dv_mem = grads
        if self.plan.M == 0:
            dk_mem, dv_mem = dk, dv  # of which nothing is written
        # The gradient of q is the sum of what comes through content and through positions, so w's is its sum less u's.
        dq_sum, dr_sum = self._queries(dq)
        du_sum = self._keys(dk, dv, dk_mem, dv_mem).sum((0, 2))
        if dr_sum is None:
            dr_sum = self._table()
        first = self.plan.first_row
        dr[:, :first] = 0.0
        dr[:, first : first + self.plan.T] = dr_sum[0] if dr_sum.size(0) == 1 else dr_sum.sum(0)
        dr[:, first + self.plan.T :] = 0.0
        du.copy_(du_sum)
        dw.copy_(dq_sum.sum((0, 2)) - du_sum)

    def _float32(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.dout.device)

    def _constants(self, chosen: config.Config, tma: bool, *written: Tensor) -> dict[str, Any]:
        either = {"WIDE": self.plan.constants["WIDE"] or wide(self.dout, *written)}
        return {**self.plan.constants, **either, "BLOCK": chosen.block_m, "TMA": tma, **_options(chosen)}

    def _queries(self, dq: Tensor) -> tuple[Tensor, Tensor | None]:
        """dq; returns its sums over blocks of queries [B, H, blocks, D], and dr [1, H, T, D] where atomics add it up."""
        call, plan = self.call, self.plan
        atomics = config.dr_by_atomics()
        chosen = _config("backward_queries", call, plan, plan.descriptors, atomics)
        blocks = triton.cdiv(plan.L, chosen.block_m)
        dq_sum = self._float32(plan.B, plan.H, blocks, plan.D)
        dr_sum = self._float32(1, plan.H, plan.T, plan.D).zero_() if atomics else None
        backward_queries_kernel[(blocks * plan.bh,)](
            self.qu, self.qw, *plan.sources(call, chosen.block_m), call.start, call.end, self.reach.key_last,
            self.reach.row_last, call.seed, self.dout, self.delta, self.lse2, dq, dq_sum, dr_sum,
            *self.steps, *_steps(dq), *plan.sizes, *self.numbers, **self._constants(chosen, plan.descriptors, dq),
        )  # fmt: skip
        return dq_sum, dr_sum

    def _streams(self, chosen: config.Config) -> list[Any]:
        """q + u, q + w, r and dout as the kernels that walk queries take them."""
        return [self.plan.rows(x, 0, chosen.block_m, self.tma) for x in (self.qu, self.qw, self.plan.r, self.dout)]

    def _keys(self, dk: Tensor, dv: Tensor, dk_mem: Tensor, dv_mem: Tensor) -> Tensor:
        """dk, dv and the memory's; returns the shares of du [B, H, blocks, D]."""
        call, plan = self.call, self.plan
        chosen = _config("backward_keys", call, plan, self.tma)
        blocks = triton.cdiv(plan.M, chosen.block_m) + triton.cdiv(plan.L, chosen.block_m)
        du_sum, written = self._float32(plan.B, plan.H, blocks, plan.D), (dk, dv, dk_mem, dv_mem)
        qu, qw, r, dout = self._streams(chosen)
        backward_keys_kernel[(blocks * plan.bh,)](
            qu, qw, call.k, call.v, plan.k_mem, plan.v_mem, r, call.start, call.end, self.reach.key_first,
            self.reach.key_last, call.seed, dout, self.delta, self.lse2, *written, du_sum,
            *self.steps, *_steps(*written), *plan.sizes, *self.numbers, **self._constants(chosen, self.tma, *written),
        )  # fmt: skip
        return du_sum

    def _table(self) -> Tensor:
        """dr as float32 [parts, H, T, D], to be added up."""
        call, plan = self.call, self.plan
        chosen = _config("backward_table", call, plan, self.tma)
        blocks = triton.cdiv(plan.zero_row, chosen.block_m) + triton.cdiv(
            max(plan.T - plan.zero_row, 0), chosen.block_m
        )
        programs = blocks * plan.H
        parts = min(plan.B, triton.cdiv(2 * multiprocessors(self.dout.device), max(programs, 1)))
        dr_sum = self._float32(parts, plan.H, plan.T, plan.D)
        qu, qw, r, dout = self._streams(chosen)
        if programs:
            backward_table_kernel[(programs, parts)](
                qu, qw, call.k, call.v, plan.k_mem, plan.v_mem, r, call.start, call.end, self.reach.row_first,
                self.reach.row_last, call.seed, dout, self.delta, self.lse2, dr_sum,
                *self.steps, plan.B, *plan.sizes, *self.numbers, **self._constants(chosen, self.tma),
            )  # fmt: skip
        return dr_sum
