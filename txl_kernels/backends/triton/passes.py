"""The launches of a checked call's forward and backward.

Nothing here reads a tensor's values or waits for the device, so calls can be captured in a CUDA
graph. Launches depend on the forms of tensors, the settings, the device and the precision of
float32 products. All calls that agree in these share one layout.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from txl_kernels.backends.triton import config
from txl_kernels.backends.triton.growing import run_forward
from txl_kernels.backends.triton.kernels.backward_keys import backward_keys_kernel, backward_table_kernel
from txl_kernels.backends.triton.kernels.backward_queries import backward_queries_kernel, finish_kernel
from txl_kernels.backends.triton.kernels.forward import forward_kernel, merge_kernel
from txl_kernels.backends.triton.kernels.prepare import prepare_kernel
from txl_kernels.backends.triton.kernels.visible import reach_kernel
from txl_kernels.backends.triton.launch import (
    Launch,
    Launches,
    Operand,
    Workspace,
    forms_of,
)
from txl_kernels.backends.triton.plan import (
    ROWS,
    TABLE,
    Plan,
    bounds,
    cached_layout,
    common_args,
    describable,
    keys_walked,
    make_plan,
    multiprocessors,
    operands,
    options,
    parts_of_keys,
    sinks,
    strides,
)
from txl_kernels.backends.zero_biases import with_biases
from txl_kernels.call import INPUTS, TENSORS, Call, Wanted, empty_gradients, empty_out, inputs_of, is_bounded

MERGE_CHUNK = 16
REACH_CELLS, REACH_CHUNK = 128, 32
FINISH_CELLS = 4096  # elements of a tile that is summed
REACH = ("KEY_FIRST", "KEY_LAST", "ROW_FIRST", "ROW_LAST")


def _with_rows(call: Call) -> Call:
    """Return the call with `r_bias` as [H, T, 1], because rows are counted in the last axis but
    one."""
    return call if call.r_bias is None else call._replace(r_bias=call.r_bias.unsqueeze(-1))


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Run forward; see `txl_kernels.backends.triton.forward`."""
    q, device = call.q, call.q.device
    call = with_biases(call)
    out = empty_out(q, call.v)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device)
    if q.numel():
        tensors: list[Any] = [*_with_rows(call)[: len(TENSORS)], out, lse]
        run_forward(device, tensors, call[len(TENSORS) :], config.kind_of(q.dtype), lay_out_forward)
    return out, lse


@cached_layout
def lay_out_forward(device: torch.device, forms: tuple[Any, ...], settings: tuple[Any, ...], kind: str) -> Launches:
    """Return the launches that compute out and lse. Keys are split into parts if the blocks of
    queries alone would leave multiprocessors idle.

    forms: of TENSORS, out and lse. The other arguments are those of `make_plan`.
    """
    plan = make_plan(device, forms[: len(TENSORS)], settings, kind)
    if kind == "float32" and not config.interpreted():
        config.log_full_precision()
    out, lse = operands(forms[len(TENSORS) :], len(TENSORS))
    workspace = Workspace(len(forms))
    chosen = plan.tile("decode" if plan.L < config.DECODE_LENGTH else "forward", plan.descriptors)
    programs = triton.cdiv(plan.L, chosen.block_m) * plan.bh
    keys = keys_walked(plan, plan.L, chosen.block_m)
    parts = parts_of_keys(programs, keys, chosen.block_n, multiprocessors(device))
    into, into_lse, into_strides = out, lse, strides("out", out)
    if parts > 1:
        into = workspace.add(torch.float32, parts, plan.bh, plan.L, plan.D_V)
        into_lse = workspace.add(torch.float32, 2, parts, plan.bh, plan.L)
        into_strides = {"out_batch": 0, "out_head": 0, "out_row": plan.D_V}
    q, q_pos, u, w, sink = plan.call.q, plan.call.q_pos, plan.call.content_bias, plan.call.position_bias, plan.call.sink
    own_sink = sink if parts == 1 else None  # of several parts it is merged with their sum
    launches = [
        Launch(
            forward_kernel, (programs, parts), Q=q, Q_POS=q_pos, U=u, W=w, SINK=own_sink, OUT=into, LSE=into_lse,
            sign=plan.sign, **strides("q", q), **strides("qp", q_pos, ROWS), **strides("u", u), **strides("w", w),
            **sinks("sink", own_sink), **into_strides,
            **plan.sources(chosen.block_n, "V"), **common_args(plan), **options(chosen),
            BM=chosen.block_m, BN=chosen.block_n, ZERO_OUTSIDE=plan.call.zero_outside, SPLIT=parts > 1,
            TMA=plan.descriptors, **plan.addressing(out.form),
        )
    ]  # fmt: skip
    if parts > 1:
        merge = Launch(
            merge_kernel, (plan.bh * plan.L,), PARTS=into, PART_SUMS=into_lse, SINK=sink, OUT=out, LSE=lse,
            **sinks("sink", sink), **strides("out", out), H=plan.H, L=plan.L, parts=parts,
            scale_log2=plan.scale_log2, D=plan.D_V, BLOCK_D=plan.block_dv, CHUNK=MERGE_CHUNK, num_warps=2,
        )  # fmt: skip
        launches.append(merge)
    return Launches(launches, workspace)


def backward(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> tuple[Tensor | None, ...]:
    """Run backward; see `txl_kernels.backends.triton.backward`."""
    if call.q.numel() == 0:
        return tuple(None if x is None else x.zero_() for x in empty_gradients(call, wanted))
    wanted = [want and x is not None for want, x in zip(wanted, inputs_of(call), strict=True)]
    call = with_biases(call)
    grads = empty_gradients(call)
    device, settings = call.q.device, call[len(TENSORS) :]
    bias_at = INPUTS.index("r_bias")
    given = [x.unsqueeze(-1) if n == bias_at and x is not None else x for n, x in enumerate(grads)]  # as [H, T, 1]
    tensors: list[Any] = [*_with_rows(call)[: len(TENSORS)], out, lse, dout, dlse, *given]
    kind = config.kind_of(call.q.dtype)
    launches = lay_out_backward(device, forms_of(tensors), settings, kind, config.dr_by_atomics())
    launches.run(device, tensors)
    return tuple(x if want else None for x, want in zip(grads, wanted, strict=True))


@cached_layout
def lay_out_backward(
    device: torch.device, forms: tuple[Any, ...], settings: tuple[Any, ...], kind: str, atomics: bool
) -> Launches:
    """Return the launches that compute the gradients.

    forms: of TENSORS, out, lse, dout, dlse, and of the gradients in the order of INPUTS.
    atomics: whether dr is summed by atomics. The other arguments are those of `make_plan`.
    """
    plan = make_plan(device, forms[: len(TENSORS)], settings, kind)
    backward = _Backward(plan, operands(forms[len(TENSORS) :], len(TENSORS)), Workspace(len(forms)), atomics)
    return Launches(backward.launches, backward.workspace)


class _Backward:
    """The launches of one backward call, and what they share.

    given: the operands of out, lse, dout, dlse and the gradients.
    atomics: whether dr is summed by atomics.
    """

    def __init__(self, plan: Plan, given: list[Any], workspace: Workspace, atomics: bool) -> None:
        self.plan, self.workspace, self.atomics = plan, workspace, atomics
        out, lse, self.dout, dlse, *grads = given
        self.grads = dict(zip(INPUTS, grads, strict=True))
        self.launches: list[Launch] = []
        dtype, sizes = plan.call.q.form.dtype, (plan.B, plan.H, plan.L)
        self.qu = self.workspace.add(dtype, *sizes, plan.D)
        self.qw = None if plan.r is None else self.workspace.add(dtype, *sizes, plan.D_P)
        self.delta, self.top, self.lse2 = (self._float32(*sizes) for _ in range(3))
        walked = [x.form for x in (self.dout, self.qu, self.qw) if x is not None]
        self.tma = plan.descriptors and all(map(describable, walked))
        self.reach = self._reach()
        self.shared = common_args(plan) | strides("do", self.dout)
        self.shared |= {"DELTA": self.delta, "TOP": self.top, "LSE2": self.lse2}
        self._prepare(out, lse, dlse)
        # dq is the sum of a part through content and a part through positions, whose sums over
        # queries are the gradients of u and w. So w's gradient is the sum of dq less u's gradient.
        # With `q_pos` they are the sums of dq and of the gradient of `q_pos`.
        dr_sum, db_sum = self._table_sums(1, zeros=True) if atomics else (None, None)
        dq_sum, dq_pos_sum = self._queries(dr_sum, db_sum)
        du_sum = self._keys()
        if not atomics:
            dr_sum, db_sum = self._table()
        self._finish(dq_sum, dq_pos_sum, du_sum, dr_sum, db_sum)

    def _float32(self, *shape: int, zeros: bool = False) -> Operand:
        return self.workspace.add(torch.float32, *shape, zeros=zeros)

    def _table_sums(self, shares: int, zeros: bool = False) -> tuple[Operand | None, Operand | None]:
        """Allocate dr, float32 [shares, H, T, D_P], and the gradient of `r_bias`, [shares, H, T];
        None for a table that the call does not have."""
        plan, sizes = self.plan, (shares, self.plan.H, self.plan.T)
        dr = None if plan.r is None else self._float32(*sizes, plan.D_P, zeros=zeros)
        return dr, None if plan.r_bias is None else self._float32(*sizes, zeros=zeros)

    def _launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        self.launches.append(Launch(kernel, grid, **arguments))

    def _reach(self) -> dict[str, Operand | None]:
        """Launch the kernel that computes the first and last query that sees each key, int32 [B,
        S], and that uses each row of r, int32 [B, T]. Return these operands by name; all are None
        without bounds."""
        plan = self.plan
        if not is_bounded(plan.call):
            return dict.fromkeys(REACH)
        keys = plan.M + plan.L
        widths = (keys, keys, plan.T, plan.T)
        reach: dict[str, Operand | None] = {
            name: self.workspace.add(torch.int32, plan.B, n) for name, n in zip(REACH, widths, strict=True)
        }
        self._launch(
            reach_kernel, (plan.B * triton.cdiv(max(keys, plan.T), REACH_CELLS),), **reach, **bounds(plan), L=plan.L,
            M=plan.M, T=plan.T, zero_row=plan.zero_row, left=plan.left, right=plan.right, CELLS=REACH_CELLS,
            CHUNK=REACH_CHUNK,
        )  # fmt: skip
        return reach

    def _reached(self, *names: str) -> dict[str, Operand | None]:
        return {name: self.reach[name] for name in names}

    def _prepare(self, out: Operand, lse: Operand, dlse: Operand | None) -> None:
        plan, call = self.plan, self.plan.call
        w = None if plan.r is None else call.position_bias
        dsink = None if call.sink is None else self.grads["sink"]
        chosen = plan.tile("backward_queries", False)
        self._launch(
            prepare_kernel, (triton.cdiv(plan.L, chosen.block_m) * plan.bh,), Q=call.q, Q_POS=call.q_pos,
            U=call.content_bias, W=w, SINK=call.sink, OUT=out, DOUT=self.dout, LSE=lse, DLSE=dlse, QU=self.qu,
            QW=self.qw, DELTA=self.delta, TOP=self.top, LSE2=self.lse2, DSINK=dsink, K=call.k, K_MEM=plan.k_mem,
            R=plan.r, R_BIAS=plan.r_bias, **bounds(plan),
            **strides("q", call.q), **strides("qp", call.q_pos, ROWS), **strides("u", call.content_bias),
            **strides("w", w, ("head",)), **sinks("sink", call.sink), **sinks("ds", dsink),
            **strides("out", out), **strides("do", self.dout), **strides("k", call.k), **strides("km", plan.k_mem),
            **strides("r", plan.r, TABLE), **strides("rb", plan.r_bias, TABLE), H=plan.H, L=plan.L, M=plan.M,
            T=plan.T, zero_row=plan.zero_row, left=plan.left, right=plan.right, group=plan.group,
            sign=plan.sign, scale_log2=plan.scale_log2, position_factor=plan.position_factor, to_cap=plan.to_cap,
            BLOCK=chosen.block_m, D=plan.D, BLOCK_D=plan.block_d, D_V=plan.D_V, BLOCK_DV=plan.block_dv, D_P=plan.D_P,
            BLOCK_DP=plan.block_dp, PRECISION=plan.constants["PRECISION"],
            **plan.addressing(out.form, self.dout.form), num_warps=chosen.warps, num_stages=1,
        )  # fmt: skip

    def _tiles(self, chosen: config.Config, tma: bool, *written: Operand) -> dict[str, Any]:
        """Return the arguments by which a kernel loads and stores rows. written: further tensors
        whose strides count."""
        addressing = self.plan.addressing(self.dout.form, *(x.form for x in written))
        return {"BLOCK": chosen.block_m, "TMA": tma, **addressing, **options(chosen)}

    def _queries(self, dr_sum: Operand | None, db_sum: Operand | None) -> tuple[Operand, Operand | None]:
        """Launch the kernel for dq and the gradient of `q_pos`. Return their sums over each block
        of queries, float32 [B, H, blocks, D] and [B, H, blocks, D_P], or None without `q_pos`.

        dr_sum, db_sum: where atomics sum the tables' gradients, or None.
        """
        plan, tma, dq = self.plan, self.plan.descriptors, self.grads["q"]
        chosen = plan.tile("backward_queries", tma)
        blocks = triton.cdiv(plan.L, chosen.block_m)
        dq_sum = self._float32(plan.B, plan.H, blocks, plan.D)
        dq_pos, dq_pos_sum = None, None
        if plan.call.q_pos is not None:
            dq_pos, dq_pos_sum = self.grads["q_pos"], self._float32(plan.B, plan.H, blocks, plan.D_P)
        written = [x for x in (dq, dq_pos) if x is not None]
        self._launch(
            backward_queries_kernel, (blocks * plan.bh,), QU=self.qu, QW=self.qw, DOUT=self.dout,
            DQ=dq, DQ_SUM=dq_sum, DQ_POS=dq_pos, DQ_POS_SUM=dq_pos_sum, DR=dr_sum, DB=db_sum, **strides("dq", dq),
            **strides("dqp", dq_pos, ROWS), **self._reached("KEY_LAST", "ROW_LAST"),
            **plan.sources(chosen.block_m, "K"), **self.shared, **plan.scales, **self._tiles(chosen, tma, *written),
            ZERO_OUTSIDE=plan.call.zero_outside, APART=plan.apart,
        )  # fmt: skip
        return dq_sum, dq_pos_sum

    def _streams(self, chosen: config.Config, r_blocks: int) -> dict[str, Any]:
        """Return q + u, q + w, dout, r, keys and values as arguments of the kernels that walk
        queries.

        r_blocks: the number of blocks of r that a kernel loads at once.
        """
        plan = self.plan
        walked = {"QU": (self.qu, 1), "QW": (self.qw, 1), "DOUT": (self.dout, 1), "R": (plan.r, r_blocks)}
        loaded = {
            name: None if x is None else plan.rows(x, 0, n * chosen.block_m, self.tma)
            for name, (x, n) in walked.items()
        }
        return loaded | {"K": plan.call.k, "V": plan.call.v, "K_MEM": plan.k_mem, "V_MEM": plan.v_mem}

    def _keys(self) -> Operand | None:
        """Launch the kernel for dk, dv and the memory's gradients. Return each block's share of du,
        float32 [B, H, blocks, D], or None with `q_pos`."""
        plan = self.plan
        dk, dv = self.grads["k"], self.grads["v"]
        # Without a memory nothing is written to its gradients.
        dk_mem, dv_mem = (self.grads["k_mem"], self.grads["v_mem"]) if plan.M else (dk, dv)
        chosen = plan.tile("backward_keys", self.tma)
        blocks = triton.cdiv(plan.M, chosen.block_m) + triton.cdiv(plan.L, chosen.block_m)
        du_sum = None if plan.call.q_pos is not None else self._float32(plan.B, plan.H, blocks, plan.D)
        self._launch(
            backward_keys_kernel, (blocks * plan.bh // (plan.group or 1),), DK=dk, DV=dv, DK_MEM=dk_mem, DV_MEM=dv_mem,
            DU=du_sum, scale=plan.scales["scale"],
            **strides("dk", dk), **strides("dv", dv), **strides("dkm", dk_mem), **strides("dvm", dv_mem),
            **self._reached("KEY_FIRST", "KEY_LAST"), **self._streams(chosen, 2), **self.shared,
            **self._tiles(chosen, self.tma, dk, dv, dk_mem, dv_mem), ZERO_OUTSIDE=plan.call.zero_outside,
        )  # fmt: skip
        return du_sum

    def _table(self) -> tuple[Operand | None, Operand | None]:
        """Launch the kernel for the tables' gradients. Return its partial sums, which `_table_sums`
        allocates."""
        plan = self.plan
        chosen = plan.tile("backward_table", self.tma)
        low_blocks = triton.cdiv(plan.zero_row, chosen.block_m)  # blocks of negative distances
        programs = (low_blocks + triton.cdiv(max(plan.T - plan.zero_row, 0), chosen.block_m)) * plan.H
        shares = min(plan.B, triton.cdiv(2 * multiprocessors(plan.device), max(programs, 1)))
        dr_sum, db_sum = self._table_sums(shares)
        if programs:
            self._launch(
                backward_table_kernel, (programs, shares), DR=dr_sum, DB=db_sum, B=plan.B,
                **self._reached("ROW_FIRST", "ROW_LAST"), **self._streams(chosen, 1), **self.shared, **plan.scales,
                **self._tiles(chosen, self.tma),
            )  # fmt: skip
        return dr_sum, db_sum

    def _finish(
        self,
        dq_sum: Operand,
        dq_pos_sum: Operand | None,
        du_sum: Operand | None,
        dr_sum: Operand | None,
        db_sum: Operand | None,
    ) -> None:
        """Launch the kernel that computes du, dw and the tables' gradients from the partial sums of
        the others."""
        plan = self.plan
        du, dw = self.grads["content_bias"], self.grads["position_bias"]
        dr = None if plan.r is None else self.grads["r"]
        db = None if plan.r_bias is None else self.grads["r_bias"]
        shares = next(x.form.shape[0] for x in (dr_sum, db_sum) if x is not None)
        block = FINISH_CELLS // max(plan.block_d, plan.block_dp)
        rows = next(x.form.shape[1] for x in (dr, db) if x is not None)
        self._launch(
            finish_kernel, (plan.H * (1 + triton.cdiv(rows, block)),), DQ_SUM=dq_sum, DQ_POS_SUM=dq_pos_sum,
            DU_SUM=du_sum, DR_SUM=dr_sum, DB_SUM=db_sum, DU=du, DW=dw, DR=dr, DB=db, **strides("du", du),
            **strides("dw", dw), **strides("dr", dr, TABLE), db_head=None if db is None else db.form.strides[0],
            B=plan.B, H=plan.H, T=plan.T, rows=rows, first_row=plan.first_row, query_blocks=dq_sum.form.shape[2],
            key_blocks=None if du_sum is None else du_sum.form.shape[2], shares=shares, BLOCK=block, D=plan.D,
            BLOCK_D=plan.block_d, D_P=plan.D_P, BLOCK_DP=plan.block_dp,
        )  # fmt: skip
