"""What an evaluation computes in."""

import statistics
import time
from collections.abc import Callable

import torch

from txl.distributed.world import World
from txl.errors import TxlError
from txl.training.precision import FASTER, PRECISIONS, autocast_dtype, may_help

_ROUNDS = 3


def in_dtype(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Computes in dtype by torch.autocast; in the parameters' own for None."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def evaluation_dtype(
    asked: str, device: torch.device, part: Callable[[], object], world: World
) -> tuple[torch.dtype | None, str | None]:
    """In what to evaluate (None: the parameters' own dtype), and what was measured, in words.

    part: scores a few tokens; "auto" on a CPU that multiplies bfloat16 times it in either
    precision, in turns, and takes bfloat16 where the median is `FASTER`.

    Raises:
        TxlError: `asked` is none of auto, fp32 and bf16.
    """
    if asked not in PRECISIONS:
        raise TxlError(f"--precision must be {', '.join(PRECISIONS)}, got {asked!r}")
    if asked != "auto" or not may_help(device):
        return autocast_dtype(asked, device), None

    def seconds(dtype: torch.dtype | None) -> float:
        began = time.perf_counter()
        with in_dtype(device, dtype):
            part()
        return max(world.gather(time.perf_counter() - began))

    dtypes = (None, torch.bfloat16)
    for dtype in dtypes:
        seconds(dtype)  # the first of each prepares
    rounds = [[seconds(dtype) for dtype in dtypes] for _ in range(_ROUNDS)]
    single, half = (statistics.median(column) for column in zip(*rounds, strict=True))
    chosen = dtypes[single >= FASTER * half]
    name = "fp32" if chosen is None else "bf16"
    return chosen, f"precision: {name} (a part takes {single:.3g} s in fp32, {half:.3g} s in bf16)"
