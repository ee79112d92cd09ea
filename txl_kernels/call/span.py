"""`causal` and `window` as a call holds them: how many keys a query sees after and before its
own."""

from typing import Any

from txl_kernels.checks.settings import WINDOW, check_integer

Window = int | tuple[int | None, int | None] | None
_WIDEST = 2**31  # wider than any distance
_SIDE = "None or an integer >= 0"


def span(causal: Any, window: Any) -> tuple[int | None, int | None]:
    """(ahead, window) of a `Call`: keys after a query's own, None for all; keys up to and including
    its own, None for all.

    Raises:
        TypeError, ValueError: causal or window is something else than `rel_attention` takes.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {type(causal).__name__}")
    ahead: int | None = 0 if causal else None
    if window is None:
        return ahead, None
    if isinstance(window, (tuple, list)):
        return _two_sided(causal, window)
    check_integer("window", window, 1, WINDOW)
    return ahead, min(window, _WIDEST)


def _two_sided(causal: bool, window: Any) -> tuple[int | None, int | None]:
    if len(window) != 2:
        raise ValueError(f"window must be an integer or a pair (left, right), got {len(window)} values")
    left, right = window
    for name, side in (("window[0]", left), ("window[1]", right)):
        if side is not None:
            check_integer(name, side, 0, _SIDE)
    ahead = 0 if causal else right
    if ahead is not None and ahead >= _WIDEST:
        ahead = None
    return ahead, None if left is None else min(left + 1, _WIDEST)
