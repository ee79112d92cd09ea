"""What launches pass by name: strides, and what every large kernel of a call takes."""

from functools import lru_cache
from typing import Any

from torch import Tensor

from txl_kernels.backends.triton.config import Config
from txl_kernels.backends.triton.plan import Plan
from txl_kernels.call import Call

_AXES = {4: ("batch", "head", "row"), 3: ("head", "row"), 2: ("head",)}


@lru_cache(4096)  # a dozen a call, mostly the same
def _named(name: str, steps: tuple[int, ...]) -> dict[str, int]:
    axes = _AXES[len(steps)]
    return {f"{name}_{axis}": step for axis, step in zip(axes, steps[:-1], strict=True)}  # the last axis has 1


def strides(name: str, x: Tensor) -> dict[str, int]:
    """`k` [B, H, L, D] -> k_batch, k_head, k_row; r [H, T, D] has head and row, a bias [H, D] head.

    The same dict for the same strides: not to be changed.
    """
    return _named(name, x.stride())


def bounds(call: Call) -> dict[str, Any]:
    """`start` and `end` [B, L] or None, and their strides."""
    start = (0, 0) if call.start is None else call.start.stride()
    end = (0, 0) if call.end is None else call.end.stride()
    return {
        "START": call.start, "start_batch": start[0], "start_query": start[1],
        "END": call.end, "end_batch": end[0], "end_query": end[1],
    }  # fmt: skip


def shared(call: Call, plan: Plan) -> dict[str, Any]:
    """What all kernels of forward and backward take, but for k, v, r and the memory themselves."""
    return {
        "H": plan.H, "L": plan.L, "M": plan.M, "T": plan.T, "zero_row": plan.zero_row, "back": plan.back,
        "ahead": plan.ahead, "SEED": call.seed, "scale_log2": plan.scale_log2, "drop_below": plan.drop_below,
        "keep_scale": plan.keep_scale, **bounds(call), **strides("k", call.k), **strides("v", call.v),
        **strides("km", plan.k_mem), **strides("vm", plan.v_mem), **strides("r", plan.r), **plan.constants,
    }  # fmt: skip


def options(chosen: Config) -> dict[str, int]:
    """Triton's own."""
    return {"num_warps": chosen.warps, "num_stages": chosen.stages}
