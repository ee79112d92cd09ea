"""The plain flash attention kernel of the model of clocks (tools/ptx/yardstick.py), on a device:
one head whose queries fill it, all keys visible."""

from typing import Any

import torch
from ptx.yardstick import BLOCK, STAGES, flash_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_kit.work import Make, Work
from txl_kernels.backends.triton import plan
from txl_kernels.backends.triton.config import has_descriptors

NAME = "flash kernel in Triton"
QUERIES, KEYS = BLOCK * 528, 2048  # four programs a multiprocessor
TILES = (QUERIES // BLOCK) * (KEYS // BLOCK)


def case(width: int) -> Work:
    return Work(NAME, B=1, H=1, L=QUERIES, M=0, D=width, backend=NAME, backward=False)


def flash(work: Work, device: torch.device | str, make: Make = torch.randn) -> Any:
    """A launch, ready to be repeated; made once here."""
    q, k, v = (make((n, work.D), device=device, dtype=torch.bfloat16) for n in (QUERIES, KEYS, KEYS))
    out, lse2 = (torch.empty(*shape, device=device) for shape in ((QUERIES, work.D), (QUERIES,)))
    tma = has_descriptors(plan.capability(q.device))

    def given(x: torch.Tensor) -> Any:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [BLOCK, work.D]) if tma else x

    def run() -> torch.Tensor:
        flash_kernel[(QUERIES // BLOCK,)](
            q, given(k), given(v), out, lse2, KEYS, plan.LOG2E * work.D**-0.5,
            BM=BLOCK, BN=BLOCK, D=work.D, TMA=tma, num_warps=4, num_stages=STAGES,
        )  # fmt: skip
        return out

    run()
    return run
