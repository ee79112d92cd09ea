"""What an evaluation computes in."""

import time
from collections.abc import Callable

import torch

from txl.distributed.world import World
from txl.errors import TxlError
from txl.evaluation.window import sliding_losses
from txl.model.networks import Network
from txl.precision import PRECISIONS, autocast_dtype, faster, may_help
from txl.text.vocabulary import Tokens


def check_precision(asked: str) -> None:
    """Raises TxlError if it is none of `PRECISIONS`."""
    if asked not in PRECISIONS:
        raise TxlError(f"--precision must be {', '.join(PRECISIONS)}, got {asked!r}")


def in_dtype(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Computes in dtype by torch.autocast; in the parameters' own for None."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def sliding_part(
    model: Network, tokens: Tokens, start: int, attn_len: int, segment: int, batch: int, clamp_len: int | None
) -> Callable[[], object]:
    """What "sliding" does all the time: windows of attn_len tokens side by side; arguments as
    `evaluate` has them. It is fewer and shorter ones where there are not as many tokens.

    Raises:
        TxlError: there is no token.
    """
    if len(tokens) == 0:
        raise TxlError("the split to evaluate is empty")
    attn_len = min(attn_len, len(tokens))
    segment = min(segment, attn_len)
    first = max(min(attn_len, len(tokens) - segment), 0)
    tokens = tokens[: first + segment * batch]

    def score() -> None:
        for _ in sliding_losses(model, tokens, start, attn_len, segment, batch, clamp_len, first=first):
            pass

    return score


def evaluation_dtype(
    asked: str, device: torch.device, part: Callable[[], object], world: World
) -> tuple[torch.dtype | None, str | None]:
    """In what to evaluate (None: the parameters' own dtype), and what was measured, in words.

    asked: one of `PRECISIONS`, the same in all processes. part: scores a few tokens; "auto" on CPUs
    that multiply bfloat16 times it in either precision, in turns, and takes what is `faster`.
    """
    if asked != "auto" or not all(world.gather(may_help(device))):
        return autocast_dtype(asked, device), None

    def seconds(name: str) -> float:
        began = time.perf_counter()
        with in_dtype(device, autocast_dtype(name, device)):
            part()
        return max(world.gather(time.perf_counter() - began))

    for name in ("fp32", "bf16"):
        seconds(name)  # the first of each prepares
    name, words = faster(seconds, "a part")
    return autocast_dtype(name, device), words
