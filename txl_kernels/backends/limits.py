"""The limits of each backend's kernels, beside the fields of a call that they take
(`call.TAKEN_BY`). `route` compares calls with them."""

from typing import NamedTuple

import torch

DECODE_QUERIES = 16  # the largest L of a call of decode, whatever its backend
_HALF = (torch.bfloat16, torch.float16)


class Limits(NamedTuple):
    """The limits of kernels. None stands for no limit.

    Attributes:
        kernels: their name in `call.TAKEN_BY`.
        dtypes: dtypes of q; none for every floating dtype.
        multiple_of, width: head widths D are multiples of the first, up to the second.
        value_width: the largest Dv; 0 if it must be D.
        position_width: the largest Dp.
        queries: the largest L.
        term_queries: the largest L with one of Inkling's terms (`route.inklings_term`); then Dv is
            D, and Dp a multiple of `multiple_of` up to D.
        position_widths: the numbers of columns of q_pos and r that the kernels have beside q_pos.
            Narrower rows are copied, as are values narrower than D.
        terms_need_q_pos: True if Inkling's other terms are taken beside q_pos alone.
        biases_beside_q_pos: False if q_pos is not taken beside a bias.
        position_scale: the largest multiple of `scale` that `position_scale` can be.
        capability: the only compute capability.
        row_bytes: rows of the inputs begin at multiples of as many bytes, and do not overlap.
        heads, batch, keys: the largest H, B and M + L.
        keys_of_window: True if `keys` limits the keys within `left` alone.
    """

    kernels: str
    dtypes: tuple[torch.dtype, ...] = ()
    multiple_of: int = 1
    width: int | None = None
    value_width: int | None = None
    position_width: int | None = None
    queries: int | None = None
    term_queries: int | None = None
    position_widths: tuple[int, ...] = ()
    terms_need_q_pos: bool = False
    biases_beside_q_pos: bool = True
    position_scale: float | None = None
    capability: tuple[int, int] | None = None
    row_bytes: int = 1
    heads: int | None = None
    batch: int | None = None
    keys: int | None = None
    keys_of_window: bool = False


REFERENCE = Limits("reference")
NATIVE = Limits("native", dtypes=(torch.float32, torch.bfloat16))  # in the order of txl::Type
TRITON = Limits(
    "triton",
    dtypes=(torch.float32, *_HALF),
    width=256,
    value_width=256,
    position_width=256,
    position_scale=1e30,  # scores are added in units of `scale`, in float32
)
# The kernels of the backend "cuda". A limit of `keys` is at least `prepare._MAX_KEYS`: calls of one
# signature, whose memory grows, have one route.
DECODE = Limits(
    "decode",
    dtypes=(torch.float32, *_HALF),  # in the order of txl::Type
    multiple_of=8,
    width=256,
    value_width=0,
    queries=DECODE_QUERIES,
    term_queries=4,
    heads=65535,
    keys=2**23,
    keys_of_window=True,
)
PREFILL = Limits(  # of gradients, too
    "prefill",
    dtypes=_HALF,
    multiple_of=8,
    width=128,
    value_width=0,
    position_width=16,
    position_widths=(8, 16),
    terms_need_q_pos=True,
    biases_beside_q_pos=False,
    capability=(9, 0),  # H100, H200
    row_bytes=16,  # of TMA
    heads=65535,
    batch=65535,  # batch rows are the last axis of the grid
    keys=2**26 - 128,  # the rings' offsets, 32 for each key, are 32-bit integers
)
