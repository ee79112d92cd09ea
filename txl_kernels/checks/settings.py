"""Numbers, switches and the dropout seed."""

import numbers
from typing import Any

import torch
from torch import Tensor

from txl_kernels.call import Call

ZERO_ROW = "an integer from 0 to 2**31 - 1 (the row of r that holds distance 0)"
FLOAT32_RANGE = 3.4028235e38
AHEAD = "None or an integer >= 0 (keys seen after the query's own)"
WINDOW = "None or an integer >= 1 (keys seen, the query's own included)"


def check_settings(call: Call) -> None:
    """`ahead`, `window`, `zero_row`, `scale`, `dropout_p`."""
    if call.ahead is not None:
        check_integer("ahead", call.ahead, 0, AHEAD)
    if call.window is not None:
        check_integer("window", call.window, 1, WINDOW)
    check_integer("zero_row", call.zero_row, 0, ZERO_ROW)
    if call.zero_row >= 2**31:
        raise ValueError(f"zero_row must be {ZERO_ROW}, got {call.zero_row}")
    check_number("scale", call.scale, -FLOAT32_RANGE, FLOAT32_RANGE, "None or a finite number in float32's range")
    check_number("dropout_p", call.dropout_p, 0.0, 1.0, "a number in [0, 1)")


def check_integer(name: str, value: Any, least: int, accepted: str) -> None:
    """An integer, which while tracing may be a symbol, of at least `least`; no bool, although bools
    are integers."""
    # The first test is all that torch.compile has to follow; NumPy's integers pass the second.
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):  # noqa: SIM102
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be {accepted}, got {value}")


def check_number(name: str, value: Any, low: float, high: float, accepted: str) -> None:
    """A real number in [low, high); no bool."""
    symbols = (torch.SymInt, torch.SymFloat)
    if isinstance(value, bool) or not isinstance(value, (float, int, *symbols)):  # noqa: SIM102
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    if not low <= value < high:
        raise ValueError(f"{name} must be {accepted}, got {value}")


def check_seed(seed: Any, q: Tensor, name: str = "dropout_seed") -> None:
    """A seed, if one is given: an int64 tensor of one element on q's device.

    Raises:
        TypeError: it is something else.
    """
    if seed is None:
        return
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
        got = f"{seed.dtype} {list(seed.shape)} on {seed.device}" if isinstance(seed, Tensor) else type(seed).__name__
        raise TypeError(f"{name} must be None or an int64 tensor of one element on {q.device}, got {got}")
