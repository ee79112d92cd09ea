"""From a checked call and what came of it to backward's launches. No tensor's value is read."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from txl_kernels.backends.triton import config
from txl_kernels.backends.triton.interpreter import interpreted
from txl_kernels.backends.triton.kernels.backward_keys import backward_keys_kernel
from txl_kernels.backends.triton.kernels.backward_queries import backward_queries_kernel
from txl_kernels.backends.triton.kernels.backward_table import backward_table_kernel
from txl_kernels.backends.triton.kernels.prepare import prepare_kernel
from txl_kernels.backends.triton.kernels.reach import reach_kernel
from txl_kernels.backends.triton.launch_arguments import bounds, options, shared, strides
from txl_kernels.backends.triton.plan import Plan, describable, make_plan, multiprocessors, on_device, wide
from txl_kernels.call import Call
from txl_kernels.call.fields import empty_gradients

REACH_CELLS, REACH_CHUNK = 128, 32


class Reach(NamedTuple):
    """First and last query that sees each key [B, S] and uses each row of r [B, T], int32.

    None without bounds.
    """

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
        KEY_FIRST=reach.key_first, KEY_LAST=reach.key_last, ROW_FIRST=reach.row_first, ROW_LAST=reach.row_last,
        **bounds(call), L=plan.L, M=plan.M, T=plan.T, zero_row=plan.zero_row, back=plan.back, ahead=plan.ahead,
        CELLS=REACH_CELLS, CHUNK=REACH_CHUNK,
    )  # fmt: skip
    return reach


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """See `txl_kernels.backends.triton.backward`."""
    grads = empty_gradients(call)
    if call.q.numel() == 0:
        return tuple(x.zero_() for x in grads)
    with on_device(call.q.device):
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
        self.shared = shared(call, plan) | strides("do", dout)
        self.shared |= {"DELTA": self.delta, "LSE2": self.lse2, "scale": float(call.scale)}
        block = 32 if interpreted() else 64
        prepare_kernel[(triton.cdiv(plan.L, block) * plan.bh,)](
            Q=call.q, U=call.content_bias, W=call.position_bias, OUT=out, DOUT=dout, LSE=lse, DLSE=dlse,
            QU=self.qu, QW=self.qw, DELTA=self.delta, LSE2=self.lse2, **strides("q", call.q),
            **strides("u", call.content_bias), **strides("w", call.position_bias), **strides("out", out),
            **strides("do", dout), H=plan.H, L=plan.L, sign=plan.sign,
            BLOCK=block, D=plan.D, BLOCK_D=plan.block_d, WIDE=wide(call.q, out, dout),
        )  # fmt: skip

    def run(self, grads: tuple[Tensor, ...]) -> None:
        """Fills the gradients, in the order of the call's inputs."""
        dq, dk, dv, dr, du, dw, dk_mem, dv_mem = grads
        if self.plan.M == 0:
            dk_mem, dv_mem = dk, dv  # of which nothing is written
        # The gradient of q is the sum of what comes through content and through positions, so w's
        # is its sum less u's.
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

    def _tiles(self, chosen: config.Config, tma: bool, *written: Tensor) -> dict[str, Any]:
        """How a kernel loads and stores rows. written: tensors whose rows may lie far apart,
        too."""
        far = self.plan.wide or wide(self.dout, *written)
        return {"BLOCK": chosen.block_m, "WIDE": far, "TMA": tma, **options(chosen)}

    def _queries(self, dq: Tensor) -> tuple[Tensor, Tensor | None]:
        """dq; returns its sums over blocks of queries [B, H, blocks, D], and dr.

        dr: float32 [1, H, T, D] where atomics add it up, None otherwise.
        """
        plan, tma = self.plan, self.plan.descriptors
        atomics = config.dr_by_atomics()
        chosen = plan.tile("backward_queries", tma, atomics)
        blocks = triton.cdiv(plan.L, chosen.block_m)
        dq_sum = self._float32(plan.B, plan.H, blocks, plan.D)
        dr_sum = self._float32(1, plan.H, plan.T, plan.D).zero_() if atomics else None
        backward_queries_kernel[(blocks * plan.bh,)](
            QU=self.qu, QW=self.qw, DOUT=self.dout, KEY_LAST=self.reach.key_last, ROW_LAST=self.reach.row_last,
            DQ=dq, DQ_SUM=dq_sum, DR=dr_sum, **strides("dq", dq), **plan.sources(self.call, chosen.block_m, "K"),
            **self.shared, **self._tiles(chosen, tma, dq),
        )  # fmt: skip
        return dq_sum, dr_sum

    def _streams(self, chosen: config.Config, r_blocks: int) -> dict[str, Any]:
        """q + u, q + w, dout, r, keys and values as the kernels that walk queries take them.

        r_blocks: of r a kernel loads at once.
        """
        walked = {"QU": (self.qu, 1), "QW": (self.qw, 1), "DOUT": (self.dout, 1), "R": (self.plan.r, r_blocks)}
        loaded = {name: self.plan.rows(x, 0, n * chosen.block_m, self.tma) for name, (x, n) in walked.items()}
        return loaded | {"K": self.call.k, "V": self.call.v, "K_MEM": self.plan.k_mem, "V_MEM": self.plan.v_mem}

    def _keys(self, dk: Tensor, dv: Tensor, dk_mem: Tensor, dv_mem: Tensor) -> Tensor:
        """dk, dv and the memory's; returns the shares of du [B, H, blocks, D]."""
        plan = self.plan
        chosen = plan.tile("backward_keys", self.tma)
        blocks = triton.cdiv(plan.M, chosen.block_m) + triton.cdiv(plan.L, chosen.block_m)
        du_sum = self._float32(plan.B, plan.H, blocks, plan.D)
        backward_keys_kernel[(blocks * plan.bh,)](
            KEY_FIRST=self.reach.key_first, KEY_LAST=self.reach.key_last,
            DK=dk, DV=dv, DK_MEM=dk_mem, DV_MEM=dv_mem, DU=du_sum, **strides("dk", dk), **strides("dv", dv),
            **strides("dkm", dk_mem), **strides("dvm", dv_mem), **self._streams(chosen, 2),
            **self.shared, **self._tiles(chosen, self.tma, dk, dv, dk_mem, dv_mem),
        )  # fmt: skip
        return du_sum

    def _table(self) -> Tensor:
        """dr as float32 [shares, H, T, D], to be added up."""
        plan = self.plan
        chosen = plan.tile("backward_table", self.tma)
        low_blocks = triton.cdiv(plan.zero_row, chosen.block_m)  # of negative distances
        programs = (low_blocks + triton.cdiv(max(plan.T - plan.zero_row, 0), chosen.block_m)) * plan.H
        shares = min(plan.B, triton.cdiv(2 * multiprocessors(self.dout.device), max(programs, 1)))
        dr_sum = self._float32(shares, plan.H, plan.T, plan.D)
        if programs:
            backward_table_kernel[(programs, shares)](
                ROW_FIRST=self.reach.row_first, ROW_LAST=self.reach.row_last, DR=dr_sum, B=plan.B,
                **self._streams(chosen, 1), **self.shared, **self._tiles(chosen, self.tma),
            )  # fmt: skip
        return dr_sum
