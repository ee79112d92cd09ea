"""`start` and `end` of `rel_attention` from what one has: ends of episodes, lengths."""

import torch
from torch import Tensor

from txl_kernels.checks.bounds import to_int32
from txl_kernels.checks.settings import check_integer


def start_from_done(done: Tensor, memory_len: int = 0, memory_done: Tensor | None = None) -> Tensor:
    """First key of each query's own episode, for agents whose segments hold several (GTrXL,
    Parisotto et al. 2020).

    Args:
        done: bool [B, L], True where a step was the last of its episode, as `env.step` returns it.
            Where yours marks an episode's first step instead, it is this one moved by one step:
            `first[:, 1:]`, with any last column.
        memory_len: M, positions of memory before the segment.
        memory_done: None where no episode ended in the memory, or the same for it, bool [B, M].

    Returns:
        int32 [B, L] for `start`: values in [0, M + L].

    Raises:
        TypeError, ValueError: an argument, by name.
    """
    check_integer("memory_len", memory_len, 0, "an integer >= 0")
    _check_flags("done", done)
    whole = done
    if memory_done is not None:
        _check_flags("memory_done", memory_done)
        if memory_done.shape != (done.size(0), memory_len) or memory_done.device != done.device:
            raise ValueError(
                f"memory_done must be [B, M] = [{done.size(0)}, {memory_len}] on {done.device}, got shape "
                f"{list(memory_done.shape)} on {memory_done.device}"
            )
        whole = torch.cat([memory_done, done], 1)
    offset = memory_len + done.size(1) - whole.size(1)  # of the first flag, in keys
    after = torch.arange(1, whole.size(1) + 1, device=done.device, dtype=torch.int32) + offset
    begun = torch.where(whole, after, 0).cummax(1).values  # by the end of each step
    start = torch.nn.functional.pad(begun, (1, 0))[:, :-1]  # a step belongs to the episode it ends
    return start[:, whole.size(1) - done.size(1) :].to(torch.int32)


def start_from_lengths(lengths: Tensor, total: int) -> Tensor:
    """`start` where the last `lengths[b]` of `total` keys are real: a memory that is not full yet,
    texts padded on the left.

    Args:
        lengths: int32 or int64 [B], from 0 to total.
        total: keys there are: M for a memory, M + L with the segment.

    Returns:
        int32 [B, 1].

    Raises:
        TypeError, ValueError: an argument, by name; values only where they are on the CPU.
    """
    check_integer("total", total, 0, "an integer >= 0")
    _check_lengths(lengths, total)
    return to_int32(total - lengths.long()).unsqueeze(1)


def end_from_lengths(lengths: Tensor, memory_len: int = 0) -> Tensor:
    """`end` where the first `lengths[b]` positions of a segment are real: padding on the right.

    Queries beyond their text's end see the same keys; their results mean nothing.

    Args:
        lengths: int32 or int64 [B], at least 0 and at most the segment's L.
        memory_len: M, positions of memory before the segment.

    Returns:
        int32 [B, 1].

    Raises:
        TypeError, ValueError: an argument, by name; values only where they are on the CPU.
    """
    check_integer("memory_len", memory_len, 0, "an integer >= 0")
    _check_lengths(lengths, None)
    return to_int32(memory_len + lengths.long()).unsqueeze(1)


def _check_flags(name: str, flags: Tensor) -> None:
    if not isinstance(flags, Tensor) or flags.dtype != torch.bool:
        got = flags.dtype if isinstance(flags, Tensor) else type(flags).__name__
        raise TypeError(f"{name} must be a bool tensor [B, L], got {got}")
    if flags.dim() != 2:
        raise ValueError(f"{name} must be [B, L], got shape {list(flags.shape)}")


def _check_lengths(lengths: Tensor, most: int | None) -> None:
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        got = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths must be an int32 or int64 tensor [B], got {got}")
    if lengths.dim() != 1:
        raise ValueError(f"lengths must be [B], got shape {list(lengths.shape)}")
    if lengths.device.type != "cpu" or not lengths.numel() or torch.compiler.is_compiling():
        return
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or (most is not None and high > most):
        accepted = ">= 0" if most is None else f"from 0 to total={most}"
        raise ValueError(f"lengths must be {accepted}, got values from {low} to {high}")
