"""What launches pass by name: strides, and what every large kernel of a call takes."""

from functools import lru_cache
from typing import Any

from txl_kernels.backends.triton.config import Config
from txl_kernels.backends.triton.operands import Operand
from txl_kernels.backends.triton.plan import Plan

_AXES = {4: ("batch", "head", "row"), 3: ("head", "row"), 2: ("head",)}


@lru_cache(4096)  # a dozen a call, mostly the same
def _named(name: str, steps: tuple[int, ...]) -> dict[str, int]:
    axes = _AXES[len(steps)]
    return {f"{name}_{axis}": step for axis, step in zip(axes, steps[:-1], strict=True)}  # the last axis has 1


def strides(name: str, x: Operand) -> dict[str, int]:
    """`k` [B, H, L, D] -> k_batch, k_head, k_row; r [H, T, D] has head and row, a bias head.

    The same dict for the same strides: not to be changed.
    """
    return _named(name, x.form.strides)


def bounds(plan: Plan) -> dict[str, Any]:
    """`start` and `end` [B, L] or None, and their strides."""
    start, end = plan.call.start, plan.call.end
    start_steps = (0, 0) if start is None else start.form.strides
    end_steps = (0, 0) if end is None else end.form.strides
    return {
        "START": start, "start_batch": start_steps[0], "start_query": start_steps[1],
        "END": end, "end_batch": end_steps[0], "end_query": end_steps[1],
    }  # fmt: skip


def shared(plan: Plan) -> dict[str, Any]:
    """What all kernels of forward and backward take, but for k, v, r and the memory themselves."""
    return {
        "H": plan.H, "L": plan.L, "M": plan.M, "T": plan.T, "zero_row": plan.zero_row, "back": plan.back,
        "ahead": plan.ahead, "SEED": plan.call.seed, "scale_log2": plan.scale_log2, "drop_below": plan.drop_below,
        "keep_scale": plan.keep_scale, **bounds(plan), **strides("k", plan.call.k), **strides("v", plan.call.v),
        **strides("km", plan.k_mem), **strides("vm", plan.v_mem), **strides("r", plan.r), **plan.constants,
    }  # fmt: skip


def options(chosen: Config) -> dict[str, int]:
    """Triton's own."""
    return {"num_warps": chosen.warps, "num_stages": chosen.stages}
