"""Dropout bits, a function of seed, place, query and key: see `txl_kernels.call.dropout`."""

import triton
import triton.language as tl


@triton.jit
def _kept_words(dropout, group, key):
    """Four bools for each (group of four queries, key): not dropped.

    drop_below: less 2**31, so that it is an int32.
    """
    zero = tl.zeros_like(group + key)
    w0, w1, w2, w3 = tl.philox(dropout.seed, zero + key, zero + group, zero + dropout.bh.to(tl.int32), zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return (words ^ 0x80000000).to(tl.int32, bitcast=True) >= dropout.drop_below


@triton.jit
def kept(dropout, m0, key0, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN] bool: what dropout leaves of the tile at query m0 (a multiple of 4) and key0."""
    group = (m0 // 4 + tl.arange(0, BM // 4))[:, None]  # [BM / 4, 1]
    key = (key0 + tl.arange(0, BN))[None, :]  # [1, BN]
    words = tl.reshape(_kept_words(dropout, group, key), (BM // 4, BN, 4))
    return tl.reshape(tl.permute(words, (0, 2, 1)), (BM, BN))


@triton.jit
def kept_transposed(dropout, m0, key0, BM: tl.constexpr, BN: tl.constexpr):
    """The same as [BN, BM]."""
    group = (m0 // 4 + tl.arange(0, BM // 4))[None, :]  # [1, BM / 4]
    key = (key0 + tl.arange(0, BN))[:, None]  # [BN, 1]
    return tl.reshape(_kept_words(dropout, group, key), (BN, BM))
