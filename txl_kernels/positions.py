"""Relative biases of T5 and ALiBi, for the argument `r_bias` of `rel_attention`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels.checks import check_integer


def t5_buckets(table: Tensor, distances: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Tensor:
    """Return T5's relative biases (Raffel et al. 2020) as `r_bias` [H, T], a view; differentiable
    in the table.

    Half of the buckets (of those of each sign, if bidirectional) hold one distance each. The others
    cover the distances up to `max_distance` in logarithmic steps, and the last of them also all
    greater distances. T5 does not scale scores: pass scale=1.0 to `rel_attention`.

    Args:
        table: [buckets, H], T5's `relative_attention_bias.weight`.
        distances: int32 or int64 [T], the distance of each row of `r_bias`: torch.arange(M + L) for
            causal attention (zero_row=0), else torch.arange(1 - L, M + L) (zero_row=L - 1).
        bidirectional: True for T5's encoder, which has separate buckets for keys after the query;
            False for its decoder, where these share the bucket of distance 0.
        max_distance: the configuration's `relative_attention_max_distance`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    if not isinstance(table, Tensor) or not table.is_floating_point() or table.dim() != 2:
        got = f"{table.dtype} {list(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
        raise TypeError(f"table must be a floating-point tensor [buckets, H], got {got}")
    if not isinstance(distances, Tensor) or distances.dtype not in (torch.int32, torch.int64) or distances.dim() != 1:
        got = (
            f"{distances.dtype} {list(distances.shape)}" if isinstance(distances, Tensor) else type(distances).__name__
        )
        raise TypeError(f"distances must be an int32 or int64 tensor [T], got {got}")
    if not isinstance(bidirectional, bool):
        raise TypeError(f"bidirectional must be True or False, got {type(bidirectional).__name__}")
    exact = table.size(0) // (4 if bidirectional else 2)
    if exact < 1:
        raise ValueError(f"table must have at least {4 if bidirectional else 2} buckets, got shape {list(table.shape)}")
    check_integer("max_distance", max_distance, exact + 1, f"an integer > {exact}, the distances with a bucket each")
    return F.embedding(t5_bucket_numbers(table.size(0), distances, bidirectional, max_distance), table).t()


def t5_bucket_numbers(buckets: int, distances: Tensor, bidirectional: bool, max_distance: int) -> Tensor:
    """Return the row of the table of `t5_buckets` for each distance, int64 [T]. Arguments are not
    checked.

    buckets: rows of the table.
    """
    each = buckets // 2 if bidirectional else buckets  # buckets of one sign
    exact = each // 2
    size = distances.abs() if bidirectional else distances.clamp(min=0)
    steps = torch.log(size.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (each - exact)
    bucket = torch.where(size < exact, size, (exact + steps.long()).clamp(max=each - 1))
    return bucket + (distances < 0) * each if bidirectional else bucket


def alibi_slopes(
    n_head: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Return ALiBi's slopes (Press et al. 2022), [H]: a key at distance d has slope * d subtracted
    from its score.

    If n_head is a power of two, they are 2^(-8 / n), 2^(-16 / n), .., 2^-8. Else they are those of
    the next lower power of two, followed by every other one of its double. As `r_bias`, to which
    the scale applies: -alibi_slopes(H)[:, None] * distances / scale.

    Args:
        n_head: number of heads H.

    Raises:
        TypeError, ValueError: n_head is not a positive integer.
    """
    check_integer("n_head", n_head, 1, "an integer >= 1")
    lower = 2 ** (int(n_head).bit_length() - 1)

    def of(n: int) -> Tensor:
        return torch.exp2(torch.arange(1, n + 1, device=device, dtype=torch.float64) * (-8.0 / n))

    return torch.cat([of(lower), of(2 * lower)[::2][: n_head - lower]]).to(dtype)
