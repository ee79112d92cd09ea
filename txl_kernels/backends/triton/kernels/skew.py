"""The relative shift inside a tile: from products with distances to keys of queries, and back.

A tile holds queries m of [0, BM) against keys n of [0, BN), BM <= BN; d0 is the distance of (m, n)
= (0, 0). Its pairs are at distances d0 + m - n, so they need the products with two blocks of BN
distances: `above` starts at d0, `below` at d0 - BN. With w = m - n + BN, pair (m, n) wants column w
of [below | above].

A rank-1 gather is one store to shared memory, a barrier and one load (a gather of rank 2 becomes
shuffles, many more instructions). Flat addresses put the low bits so that neither the store nor the
load has bank conflicts in the matrix units' layout of 4-byte results, and write the part that
depends on a thread's register index as a linear term.
"""

import triton
import triton.language as tl


@triton.jit
def skew(above, below, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN] float32: out[m, n] = [below | above][m, m - n + BN].

    Also its own inverse, up to which tile is new: with (ds, ds of the tile before) it gives G[m,
    c], the entries at distance d0 + c.
    """
    mh = tl.arange(0, BM // 8)[:, None, None, None]
    ml = tl.arange(0, 8)[None, :, None, None]
    nh = tl.arange(0, BN // 8)[None, None, :, None]
    nl = tl.arange(0, 8)[None, None, None, :]
    t = ml - nl
    c = t & 7
    # address bits from low to high: m0 m1 m2 | c1 c2 | c0 | m_high | c_high and which
    at = ((mh + (t >> 3) + BN // 8) * (BM // 8) + mh) * 64 + (c & 1) * 32 + (c >> 1) * 8 + ml - nh * (BM // 8 * 64)
    both = tl.reshape(tl.join(below, above), (BM // 8, 8, BN // 8, 4, 2, 2))  # m_high m_low c_high c21 c0 which
    flat = tl.reshape(tl.permute(both, (5, 2, 0, 4, 3, 1)), (2 * BM * BN,))
    return tl.reshape(tl.gather(flat, tl.reshape(at, (BM * BN,)), axis=0), (BM, BN))


@triton.jit
def skew_transposed(above, below, BLOCK: tl.constexpr):
    """The same for transposed square tiles: out[n, m] = [below ; above][m - n + BLOCK, m]."""
    nh = tl.arange(0, BLOCK // 8)[:, None, None, None]
    nl = tl.arange(0, 8)[None, :, None, None]
    mh = tl.arange(0, BLOCK // 8)[None, None, :, None]
    ml = tl.arange(0, 8)[None, None, None, :]
    t = ml - nl
    # address bits from low to high: c0 c1 c2 | m1 m2 | m0 | m_high | c_high and which
    at = (BLOCK // 8 - nh + (t >> 3)) * (BLOCK // 8 * 64) + mh * (BLOCK // 8 * 64 + 64)
    at += (ml & 1) * 32 + (ml >> 1) * 8 + (t & 7)
    both = tl.reshape(tl.join(below, above), (BLOCK // 8, 8, BLOCK // 8, 4, 2, 2))  # c_high c_low m_high m21 m0 which
    flat = tl.reshape(tl.permute(both, (5, 0, 2, 4, 3, 1)), (2 * BLOCK * BLOCK,))
    return tl.reshape(tl.gather(flat, tl.reshape(at, (BLOCK * BLOCK,)), axis=0), (BLOCK, BLOCK))
