"""Plans of calls whose tensors have the same forms: sizes and settings as kernels take them, how
tiles are loaded, and the arguments that launches pass by name."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton

from txl_kernels.backends.protocol import architecture
from txl_kernels.backends.triton import config, parse_version
from txl_kernels.backends.triton.config import interpreted
from txl_kernels.backends.triton.launch import ALIGNMENT, Form, Operand, Tile
from txl_kernels.call import Call, drop_threshold, is_bounded, keep_scale
from txl_kernels.checks import FLOAT32_RANGE

LOG2E = 1.4426950408889634
MAX_KEYS = 2**30  # positions are computed in 32 bits
LARGEST_BLOCK = 128  # the most rows of a tile
MAX_PARTS = 128
REMEMBERED = 512  # layouts that are kept, for each direction

_caches: list[Any] = []
_F = TypeVar("_F", bound=Callable[..., Any])


def cached_layout(lay_out: _F) -> _F:
    """Cache a layout function, so that calls with equal arguments (which hold no tensors) share a
    result."""
    cached = functools.lru_cache(REMEMBERED)(lay_out)
    _caches.append(cached)
    return cast(_F, cached)


def clear_layouts() -> None:
    """Drop all cached layouts. Needed when something that they depend on is replaced: tile sizes,
    kernels, or a device's capability."""
    for cached in _caches:
        cached.cache_clear()


TRITON_VERSION = parse_version(triton.__version__)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of programs that should run at once to fill the device; in the interpreter
    a number that makes tests split keys."""
    return 8 if interpreted() else int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> config.Capability:
    return config.INTERPRETER if interpreted() else architecture(device)


def wide(*forms: Form) -> bool:
    """Whether offsets inside a tile of rows need 64 bits."""
    return any(x.strides[-2] * LARGEST_BLOCK >= 2**31 for x in forms)


def stride_unit(*forms: Form) -> int:
    """Return the largest power of two, of at most 16 bytes, that divides all strides of rows; 1 if
    16 divides them, which Triton finds itself."""
    steps = [step for x in forms for step in x.strides[:-1]]
    if all(step % 16 == 0 for step in steps):
        return 1
    return math.gcd(ALIGNMENT // max(x.dtype.itemsize for x in forms), *steps)


def describable(x: Form) -> bool:
    """Whether TMA can load a tensor: its rows are aligned to 16 bytes, and no axis is empty or
    expanded."""
    unit = ALIGNMENT // x.dtype.itemsize
    return (
        x.misaligned == 0
        and min(x.shape) > 0
        and x.strides[-1] == 1
        and all(s > 0 and s % unit == 0 for s in x.strides[:-1])
    )


def _of_each_head(table: Form) -> Form:
    """Return the form of a table [H, T, D], or of its rows [T, D] where these are the same for all
    heads."""
    return table if table.strides[0] else Form(table.shape[1:], table.strides[1:], table.dtype, table.misaligned)


class Extent(NamedTuple):
    """The sizes of a call that follow from the length M of its memory; see `Plan`."""

    M: int
    T: int
    left: int
    right: int
    zero_row: int
    first_row: int
    unseen: int


def extent_of(length: int, memory: int, rows: int, left: int | None, right: int | None, zero_row: int) -> Extent:
    """Return the sizes of calls with `length` queries and `memory` keys before them.

    rows: of r and `r_bias`. left, right, zero_row: as in `Call`.

    Raises:
        ValueError: memory and segment have more than MAX_KEYS keys.
    """
    keys = memory + length
    if keys > MAX_KEYS:
        raise ValueError(f"triton takes at most {MAX_KEYS} keys, memory and segment, got {keys}")
    left = keys if left is None or left > keys else left
    right = keys if right is None or right > keys else right
    first_row = zero_row - (right if right < length else max(length - 1, 0))
    first_row = min(max(first_row, 0), rows)
    past_row = zero_row + (left if left < keys else keys - 1) + 1
    past_row = max(rows if past_row > rows else past_row, first_row)
    used = past_row - first_row
    unseen = memory - left if 0 < left < memory else 0
    return Extent(memory, used, left, right, zero_row - first_row if used else 0, first_row, unseen)


def parts_of_keys(programs: int, keys: int, block: int, wanted: int) -> int:
    """Return the number of parts into which each program's keys are split, so that about twice
    `wanted` programs run.

    keys: the most that a program walks, in blocks of `block`.
    """
    if programs >= wanted:
        return 1
    return max(1, min(-(-keys // block), -(-2 * wanted // programs), MAX_PARTS))


def keys_walked(sizes: "Extent | Plan", length: int, block_m: int) -> int:
    """Return the most keys that a program of `block_m` queries sees."""
    return min(sizes.M + length, sizes.left + sizes.right + 1 + block_m)


class Plan(NamedTuple):
    """Sizes as in `rel_attention`, and values that follow from the settings.

    r and `r_bias` are cut to the T rows that `left` and `right` let a query use. The other rows may
    hold any values.
    """

    device: torch.device
    call: Any  # a `Call` with operands in place of tensors
    B: int
    H: int
    L: int
    M: int
    T: int
    D: int
    D_V: int  # width of values
    D_P: int  # width of r: D without `q_pos`
    group: int | None  # the number of query heads that read one head of keys; None for 1
    k_mem: Operand  # k and v if no query sees the memory, of which nothing is read then
    v_mem: Operand
    unseen: int  # rows of k_mem and v_mem that precede every window
    r: Operand | None
    r_bias: Operand | None  # [H, T, 1]
    first_row: int  # the row of the call's tables at which these begin
    zero_row: int  # a row of these tables
    left: int  # keys seen before a query's own position
    right: int  # keys seen after it
    sign: float
    position_factor: float | None  # of the terms of r and `r_bias`, relative to the others; None for `sign`
    scale_log2: float  # factor of scores, or of capped scores
    to_cap: float | None  # factor of scores before the cap; None without a cap
    drop_below: int
    keep_scale: float
    kind: str  # of products; see config
    block_d: int
    block_dv: int
    block_dp: int
    loaded: tuple[Form, ...]  # q, `q_pos`, k, v, the memory and r
    constants: dict[str, Any]  # other compile-time arguments of every kernel
    descriptors: bool  # whether k, v, r and the memory are loaded by descriptors

    @property
    def bh(self) -> int:
        return self.B * self.H

    @property
    def is_one_table(self) -> bool:
        """Whether r, of the same rows for all heads, is loaded by a descriptor of [1, T, D_P]."""
        return self.descriptors and self.r is not None and self.r.form.strides[0] == 0

    @property
    def scales(self) -> dict[str, float | None]:
        """The factors of gradients, by name."""
        position_scale = None if self.position_factor is None else float(self.call.position_scale)
        return {"scale": float(self.call.scale), "position_scale": position_scale}

    @property
    def apart(self) -> bool:
        """Whether dq's two parts have separate accumulators; see `backward_queries_kernel`."""
        return capability(self.device)[0] == 10

    def addressing(self, *written: Form) -> dict[str, Any]:
        """Return the constants by which kernels address rows. written: the forms of further
        tensors."""
        forms = (*self.loaded, *written)
        return {"WIDE": wide(*forms), "UNIT": stride_unit(*forms)}

    def tile(self, kernel: str, descriptors: bool) -> config.Config:
        """Return the configuration of one kernel for these calls."""
        dropped = bool(self.constants["DROPOUT"])
        block_d = max(self.block_d, self.block_dv, self.block_dp)
        return config.choose(kernel, capability(self.device), self.kind, block_d, descriptors, dropped)

    def rows(self, x: Operand, first: int, block: int, tma: bool) -> Operand | Tile:
        """Return x, or with `tma` its descriptor from row `first` on, which loads blocks of `block`
        rows."""
        if not tma:
            return x
        shape = x.form.shape
        return Tile(
            x.rows(first, shape[-2]), (*(1,) * (len(shape) - 2), block, padded(shape[-1], capability(self.device)))
        )

    def sources(self, block: int, left_out: str) -> dict[str, Any]:
        """Return k, v, the memory and r as arguments of the kernels that walk keys.

        left_out: "K" or "V", the tensors with rows that bounds hide and the kernel must not read. A
        descriptor cannot skip rows, so with bounds these tensors are passed as pointers.
        """
        each = {"K": (self.call.k, 0), "V": (self.call.v, 0)}
        if self.r is not None:
            each["R"] = (self.r, 0)
        each |= {"K_MEM": (self.k_mem, self.unseen), "V_MEM": (self.v_mem, self.unseen)}
        bounded = is_bounded(self.call)
        return {"R": None} | {
            name: self.rows(x, first, block, self.descriptors and not (bounded and name[0] == left_out))
            for name, (x, first) in each.items()
        }


def padded(width: int, capability: config.Capability) -> int:
    """Return the number of columns of a tile for rows of this width: a power of two, at least 16.

    It is at least 64 on sm_90 with Triton before 3.8, where kernels with narrower tiles are
    reported to access memory illegally (triton-lang/triton#10573, #10486, #11366).
    """
    minimum = 64 if capability == (9, 0) and TRITON_VERSION < (3, 8) else 16
    return max(minimum, 1 << (width - 1).bit_length())


def operands(forms: Sequence[Any], first: int = 0) -> list[Any]:
    """Return operands for tensors that are numbered from `first` on. forms: the fields of each
    tensor's `Form`, or None for no tensor."""
    return [None if x is None else Operand(n, Form(*x)) for n, x in enumerate(forms, first)]


def make_plan(device: torch.device, forms: Sequence[Any], settings: Sequence[Any], kind: str) -> Plan:
    """Return the plan of checked calls.

    forms: the fields of each tensor's `Form`, or None, in the order of `Call`.
    settings: the fields that are not tensors, in the order of `Call`.
    kind: see `config.kind_of`.

    Raises:
        ValueError: as in `extent_of`.
    """
    call: Any = Call(*operands(forms), *settings)
    batch, heads, length, width = call.q.form.shape
    value_width = call.v.form.shape[3]
    position_width = (call.q if call.q_pos is None else call.q_pos).form.shape[3]
    group = heads // call.k.form.shape[1]
    memory = 0 if call.k_mem is None else call.k_mem.form.shape[2]
    rows = (call.r_bias if call.r is None else call.r).form.shape[1]
    extent = extent_of(length, memory, rows, call.left, call.right, call.zero_row)
    k_mem, v_mem = (call.k_mem, call.v_mem) if memory and extent.left else (call.k, call.v)
    first_row, past_row = extent.first_row, extent.first_row + extent.T
    r, r_bias = (None if x is None else x.rows(first_row, past_row) for x in (call.r, call.r_bias))
    loaded = [x.form for x in (call.k, call.v, k_mem, v_mem)] + ([] if r is None else [_of_each_head(r.form)])
    queries = [x.form for x in (call.q, call.q_pos) if x is not None]
    block_d, block_dv, block_dp = (padded(x, capability(device)) for x in (width, value_width, position_width))
    constants = {
        "D": width,
        "BLOCK_D": block_d,
        "D_V": value_width,
        "BLOCK_DV": block_dv,
        "D_P": position_width,
        "BLOCK_DP": block_dp,
        "DROPOUT": call.dropout_p > 0,
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
    }
    # Kernels add scores in units of `scale`. A scale of 0 makes all scores 0, but for the terms of
    # positions, if these have another scale.
    unit, position_factor = abs(call.scale), None
    if call.q_pos is not None or call.position_scale != call.scale:
        unit = unit or abs(call.position_scale)
        position_factor = call.position_scale / (unit or 1.0)
    scale_log2, to_cap = unit * LOG2E if unit else 1.0, None
    if call.softcap:
        scale_log2, to_cap = call.softcap * LOG2E, min(unit / call.softcap, FLOAT32_RANGE)
    return Plan(
        device, call, batch, heads, length, memory, extent.T, width, value_width, position_width,
        None if group == 1 else group, k_mem, v_mem, extent.unseen, r, r_bias, first_row, extent.zero_row,
        left=extent.left,
        right=extent.right,
        # Kernels get the scale's absolute value, and multiply queries by its sign.
        sign=float((call.scale > 0) - (call.scale < 0)),
        position_factor=position_factor,
        scale_log2=scale_log2,
        to_cap=to_cap,
        drop_below=drop_threshold(call.dropout_p),
        keep_scale=keep_scale(call.dropout_p),
        kind=kind,
        block_d=block_d,
        block_dv=block_dv,
        block_dp=block_dp,
        loaded=(*queries, *loaded),
        constants=constants,
        descriptors=config.has_descriptors(capability(device)) and all(map(describable, loaded)),
    )  # fmt: skip


ROWS = ("batch", "head", "row")  # the axes of q and `q_pos`
TABLE = ("head", "row")  # the axes of r and `r_bias`
_AXES = {4: ROWS, 3: TABLE, 2: ("head",)}


@functools.lru_cache(4096)  # about twelve a call, mostly equal
def _named(name: str, steps: tuple[int, ...]) -> dict[str, int | None]:
    axes = _AXES[len(steps)]
    return {f"{name}_{axis}": step for axis, step in zip(axes, steps[:-1], strict=True)}  # the last axis has stride 1


def strides(name: str, x: Operand | None, axes: tuple[str, ...] = ()) -> dict[str, int | None]:
    """Return the strides of x by name: k [B, H, L, D] has k_batch, k_head and k_row; r [H, T, D]
    has head and row; a bias [H, D] has head. If x is None, so are the strides of `axes`.

    Equal strides share one dict, which must not be changed.
    """
    if x is None:
        return {f"{name}_{axis}": None for axis in axes}
    return _named(name, x.form.strides)


def sinks(name: str, x: Operand | None) -> dict[str, int | None]:
    """Return the strides of a tensor of sinks [B, H, L], or None, by name."""
    steps = (None, None, None) if x is None else x.form.strides
    return {f"{name}_{axis}": step for axis, step in zip(("batch", "head", "query"), steps, strict=True)}


def bounds(plan: Plan) -> dict[str, Any]:
    """Return `start` and `end`, [B, L] or None, and their strides, by name."""
    start, end = plan.call.start, plan.call.end
    start_steps = (0, 0) if start is None else start.form.strides
    end_steps = (0, 0) if end is None else end.form.strides
    return {
        "START": start, "start_batch": start_steps[0], "start_query": start_steps[1],
        "END": end, "end_batch": end_steps[0], "end_query": end_steps[1],
    }  # fmt: skip


def common_args(plan: Plan) -> dict[str, Any]:
    """Return the arguments that all kernels of forward and backward take, by name, except k, v, r
    and the memory."""
    return {
        "H": plan.H, "L": plan.L, "M": plan.M, "T": plan.T, "zero_row": plan.zero_row, "left": plan.left,
        "right": plan.right, "group": plan.group, "SEED": plan.call.seed, "scale_log2": plan.scale_log2,
        "position_factor": plan.position_factor, "to_cap": plan.to_cap, "drop_below": plan.drop_below,
        "keep_scale": plan.keep_scale, "R_BIAS": plan.r_bias, **bounds(plan),
        **strides("k", plan.call.k), **strides("v", plan.call.v), **strides("km", plan.k_mem),
        **strides("vm", plan.v_mem), **strides("r", plan.r, TABLE), **strides("rb", plan.r_bias, TABLE),
        **plan.constants, **({"r_head": None} if plan.is_one_table else {}),
    }  # fmt: skip


def options(chosen: config.Config) -> dict[str, int]:
    """Return Triton's own options of a configuration."""
    return {"num_warps": chosen.warps, "num_stages": chosen.stages}
