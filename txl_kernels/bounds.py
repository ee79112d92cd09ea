"""Functions that make `start` and `end` of `rel_attention` from masks [.., L, S] of either
polarity, ends of episodes, lengths, or offsets of packed sequences."""

import torch
from torch import Tensor

from txl_kernels.backends import cpu
from txl_kernels.checks import check_integer, to_int32
from txl_kernels.library import define
from txl_kernels.torch_state import exporting


def intervals(mask: Tensor, *, visible: bool, check: bool = True) -> tuple[Tensor, Tensor]:
    """Return the interval of keys that a mask lets each query see.

    On a CPU the mask is read once; a row that `expand` repeats for all queries is read only once.

    Args:
        mask: bool [B, S] (padding, the same for all queries), [B, L, S] or [B, 1, L, S]; B and L
            may be 1.
        visible: the mask's value where a query sees a key. True for an attention mask of
            `scaled_dot_product_attention` or transformers, False for `key_padding_mask` and
            `attn_mask` of `torch.nn.MultiheadAttention`. It has no default because libraries
            differ.
        check: True to raise if a mask hides keys between visible ones, which an interval cannot
            express; if False, such keys count as visible. On a GPU the check synchronizes with the
            device; under torch.compile it is an assertion that runs with the graph.

    Returns:
        start, end: int32 [B, L], or [B, 1] where all queries share a row of the mask; both 0 for a
            query that sees no key.

    Raises:
        TypeError: mask is not a bool tensor, or visible is not a bool.
        ValueError: mask has another shape, or hides a key between visible ones; the message names
            the first such batch row and query.

    Example:
        >>> padding = torch.tensor([[False, False, False, True]])  # True hides, as in torch.nn
        >>> intervals(padding, visible=False)
        (tensor([[0]], dtype=torch.int32), tensor([[3]], dtype=torch.int32))
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"mask must be a bool tensor, got {got}; pass mask.bool() for a mask of 0 and 1 (a tokenizer's has 1 where a "
            "key is visible), mask == 0 for an additive mask of 0 and -inf"
        )
    if not isinstance(visible, bool):
        raise TypeError(f"visible must be True or False, got {type(visible).__name__}")
    start, end, hole = scan(mask, visible)
    if not check:
        return start, end
    if torch.compiler.is_compiling():
        torch._assert_async(hole < 0, "mask has a hidden key between visible ones")
        start, end = refused_with(hole, start), refused_with(hole, end)
    elif not hole.is_meta and int(hole) >= 0:
        row, query = divmod(int(hole), start.size(1))
        raise ValueError(
            f"mask must hide no key between visible ones (a query sees one interval), got a hole for batch row {row}, query "
            f"{query}"
        )
    return start, end


def scan(mask: Tensor, visible: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (start, end, hole). hole, int64 [], is the first b * L + i whose query has a hidden
    key between visible ones, or -1."""
    rows = _rows(mask)
    start, end, hole = torch.ops.txl_kernels.intervals(rows, visible)
    return start, end, hole


def refused_with(hole: Tensor, bound: Tensor) -> Tensor:
    """Return start or end; in a graph that is exported, -1 instead if there is a hole, which the
    operators refuse: torch.onnx.export drops assertions.

    hole, bound: as `scan` returns them.
    """
    return torch.where(hole < 0, bound, -1) if exporting() else bound


def _rows(mask: Tensor) -> Tensor:
    """Return the mask as [B, L or 1, S]."""
    if mask.dim() == 2:
        return mask.unsqueeze(1)
    if mask.dim() == 4 and mask.size(1) == 1:
        mask = mask[:, 0]
    if mask.dim() != 3:
        raise ValueError(f"mask must be [B, S], [B, L, S] or [B, 1, L, S], got shape {list(mask.shape)}")
    return mask[:, :1] if mask.size(1) > 1 and mask.stride(1) == 0 else mask


def _in_torch(mask: Tensor, visible: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The operator in PyTorch, for any device."""
    seen = mask if visible else ~mask
    batch, length, keys = mask.shape
    if keys == 0:
        none = torch.zeros(batch, length, dtype=torch.int32, device=mask.device)
        return none, none.clone(), torch.full((), -1, dtype=torch.int64, device=mask.device)
    flags = seen.to(torch.int8)
    count = flags.sum(-1, dtype=torch.int32)
    start = flags.argmax(-1).to(torch.int32)
    end = (keys - flags.flip(-1).argmax(-1)).to(torch.int32).masked_fill(count == 0, 0)
    holes = (end - start != count).flatten()
    number = torch.arange(batch * length, device=mask.device)
    first = torch.where(holes, number, batch * length).amin() if batch * length else number.sum() + batch * length
    return start, end, torch.where(first < batch * length, first, -1)


def _on_cpu(mask: Tensor, visible: bool) -> tuple[Tensor, Tensor, Tensor]:
    if cpu.native.module is None:
        return _in_torch(mask, visible)
    if mask.size(-1) > 1 and mask.stride(-1) != 1:
        mask = mask.contiguous()
    batch, length, keys = mask.shape
    start, end = (torch.empty(batch, length, dtype=torch.int32, device=mask.device) for _ in range(2))
    hole = cpu.module().intervals(mask, batch, length, keys, visible, start, end, torch.get_num_threads())
    return start, end, torch.tensor(hole, dtype=torch.int64, device=mask.device)


def _fake(mask: Tensor, visible: bool) -> tuple[Tensor, Tensor, Tensor]:
    start = mask.new_empty(mask.shape[:2], dtype=torch.int32)
    return start, torch.empty_like(start), mask.new_empty((), dtype=torch.int64)


def _implement(library: torch.library.Library) -> None:
    library.impl("intervals", _in_torch, "CompositeExplicitAutograd")
    library.impl("intervals", _on_cpu, "CPU")
    torch.library.register_fake("txl_kernels::intervals", _fake, lib=library)


define("intervals(Tensor mask, bool visible) -> (Tensor, Tensor, Tensor)", implement=_implement)


def start_from_done(done: Tensor, memory_len: int, memory_done: Tensor | None = None) -> Tensor:
    """Return the first key of each query's own episode, for reinforcement learning where a segment
    holds several episodes (GTrXL, Parisotto et al. 2020).

    Args:
        done: bool [B, L], True at the last step of an episode, as `env.step` returns it. If you
            have flags `first` of first steps instead, shift them by one: `first[:, 1:]`, followed
            by a column of any value.
        memory_len: M, the number of memory positions before the segment, 0 for none. It has no
            default, because without it queries of a call with memory would see earlier episodes.
        memory_done: None if no episode ended in the memory, else the same flags for it, bool [B,
            M].

    Returns:
        `start`, int32 [B, L], with values in [0, M + L].

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
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
    offset = memory_len + done.size(1) - whole.size(1)  # key index of the first flag
    after = torch.arange(1, whole.size(1) + 1, device=done.device, dtype=torch.int32) + offset
    begun = torch.where(whole, after, 0).cummax(1).values  # key at which the episode after each step begins
    start = torch.nn.functional.pad(begun, (1, 0))[:, :-1]  # a step that ends an episode still belongs to it
    return start[:, whole.size(1) - done.size(1) :].to(torch.int32)


def start_from_lengths(lengths: Tensor, total: int) -> Tensor:
    """Return `start` for batch rows in which only the last `lengths[b]` of `total` keys are real: a
    memory that is not full yet, or padding on the left.

    Args:
        lengths: int32 or int64 [B], from 0 to total.
        total: the number of keys: M for a memory, M + L with the segment.

    Returns:
        int32 [B, 1].

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. Values are checked only
            on the CPU.
    """
    check_integer("total", total, 0, "an integer >= 0")
    _check_lengths(lengths, total)
    return to_int32(total - lengths.long()).unsqueeze(1)


def end_from_lengths(lengths: Tensor, memory_len: int = 0) -> Tensor:
    """Return `end` for batch rows in which only the first `lengths[b]` positions of the segment are
    real: padding on the right.

    Queries beyond the length of their batch row see the same keys; ignore their results.

    Args:
        lengths: int32 or int64 [B], from 0 to L.
        memory_len: M, the number of memory positions before the segment.

    Returns:
        int32 [B, 1].

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. Values are checked only
            on the CPU.
    """
    check_integer("memory_len", memory_len, 0, "an integer >= 0")
    _check_lengths(lengths, None)
    return to_int32(memory_len + lengths.long()).unsqueeze(1)


def _check_flags(name: str, flags: Tensor) -> None:
    if not isinstance(flags, Tensor) or flags.dtype != torch.bool:
        got = flags.dtype if isinstance(flags, Tensor) else type(flags).__name__
        hint = f"; pass {name}.bool()" if isinstance(flags, Tensor) else ""
        raise TypeError(f"{name} must be a bool tensor [B, L], got {got}{hint}")
    if flags.dim() != 2:
        raise ValueError(f"{name} must be [B, L], got shape {list(flags.shape)}")


def _check_lengths(lengths: Tensor, maximum: int | None) -> None:
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        got = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths must be an int32 or int64 tensor [B], got {got}")
    if lengths.dim() != 1:
        raise ValueError(f"lengths must be [B], got shape {list(lengths.shape)}")
    if lengths.device.type != "cpu" or not lengths.numel() or torch.compiler.is_compiling():
        return
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or (maximum is not None and high > maximum):
        accepted = ">= 0" if maximum is None else f"from 0 to total={maximum}"
        raise ValueError(f"lengths must be {accepted}, got values from {low} to {high}")


def bounds_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return `start` and `end` for sequences that are packed into one batch row (B = 1): each
    sequence sees only itself.

    Kernels skip tiles between sequences, so packed sequences cost only their own pairs.

    Args:
        cu_seqlens: int32 or int64 [sequences + 1], the offset of each sequence and the end of the
            last: from 0, never decreasing, to at most total. Positions after the last sequence see
            no key.
        total: L, the number of positions of the batch row.

    Returns:
        start, end: int32 [1, total].

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. Values are checked only
            on the CPU.
    """
    check_integer("total", total, 0, "an integer >= 0")
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor [sequences + 1], got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.size(0) == 0:
        raise ValueError(f"cu_seqlens must be [sequences + 1], got shape {list(cu_seqlens.shape)}")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        low, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if low != 0 or last > total or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to at most total={total}, got {low} to {last}"
                + ("" if low or last > total else ", with a step down")
            )
    at = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    past = torch.searchsorted(cu_seqlens, at, right=True)  # index in cu_seqlens of the end of the position's sequence
    ends = torch.cat([cu_seqlens, cu_seqlens.new_zeros(1)])[past]
    starts = torch.where(past < cu_seqlens.size(0), cu_seqlens[past - 1], 0)
    return starts.to(torch.int32).unsqueeze(0), ends.to(torch.int32).unsqueeze(0)
