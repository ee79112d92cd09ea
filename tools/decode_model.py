"""What a short call of the CUDA C++ kernels must move, and how long that takes at least: python
tools/decode_model.py

For every shape: megabytes that must come from the device's memory (k and v of all texts, r once),
that pass from the L2 to the multiprocessors (r once for every text) and that the parts write and
read back; blocks, and in how many rounds they run; and the time of these bytes at the rates below,
with the steps that nothing hides. The split is the kernel's own.
"""

import argparse
from typing import Any

import torch

from txl_kernels.backends import cuda
from txl_kernels.call import Call

# H100 SXM: multiprocessors; bytes a microsecond of a copy, and of the L2; microseconds of one trip
# to memory.
PROCESSORS, MEMORY, L2, TRIP = 132, 3.0e6, 5.5e6, 0.8
# Trips that follow one another: a block's inputs, its results to the merge, there sums, values; and
# the merge's launch.
FIXED = 4 * TRIP + 1.0
AT_ONCE = {1: 4, 4: 3, 16: 2}  # blocks of bf16 a multiprocessor holds: tools/cuda_lint.py --show


def plan_of(B: int, H: int, L: int, M: int, D: int) -> Any:
    """How the kernels split a bfloat16 call; its tensors lie nowhere."""

    def nowhere(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    q, memory, bias = nowhere(B, H, L, D), nowhere(B, H, M, D), nowhere(H, D)
    call = Call(q, q, q, nowhere(H, M + L, D), bias, bias, memory, memory, None, None, None, 0, None, 0, 1.0, 0.0)
    return cuda.make_plan(call, q, PROCESSORS)


def model(B: int, H: int, L: int, M: int, D: int) -> dict[str, Any]:
    plan = plan_of(B, H, L, M, D)
    row, keys = 2 * D, M + L
    from_memory = row * H * keys * (2 * B + 1)
    from_l2 = row * H * keys * 3 * B
    parts = 2 * 4 * B * H * L * plan.parts * (D + 2) if plan.parts > 1 else 0  # written, then read
    blocks = B * H * plan.parts
    slots = PROCESSORS * AT_ONCE[1 if L == 1 else 4 if L <= 4 else 16]
    moving = max(from_memory / MEMORY, (from_l2 + parts) / L2)
    return {
        "case": f"B{B} L{L} M{M}", "memory MB": from_memory / 1e6, "L2 MB": from_l2 / 1e6, "parts MB": parts / 1e6,
        "keys a part": plan.part_keys, "blocks": blocks, "rounds": blocks / slots,
        "us": moving + FIXED, "bound by": "L2" if (from_l2 + parts) / L2 > from_memory / MEMORY else "memory",
        "share": from_memory / MEMORY / (moving + FIXED),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    a = parser.parse_args()
    if cuda.native.module is None:
        raise SystemExit(cuda.native.missing)
    cases = [(B, 1, M) for M in (800, 3800, 32768) for B in (1, 8, 64)] + [(8, 4, 3800), (8, 16, 3800)]
    rows = [model(B, a.heads, L, M, a.width) for B, L, M in cases]
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        shown = [
            f"{x:.3g}" if isinstance(x, float) and x < 100 else f"{x:.0f}" if isinstance(x, float) else x
            for x in row.values()
        ]
        print("| " + " | ".join(map(str, shown)) + " |")


if __name__ == "__main__":
    main()
