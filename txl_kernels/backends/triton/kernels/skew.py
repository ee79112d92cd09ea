"""The relative shift inside a tile: from products with distances to keys of queries, and back.

A tile holds queries m of [0, BM) against keys n of [0, BN), BM <= BN; d0 is the distance of (m, n)
= (0, 0). Its pairs are at distances d0 + m - n, so they need the products with two blocks of BN
distances: `above` starts at d0, `below` at d0 - BN. Pair (m, n) wants column (m - n) mod BN, of
`above` where n <= m and of `below` where n > m. In row m these are the columns up to m of `above`
and the rest of `below`, so the two are one block before anything is moved.

A rank-1 gather is one store to shared memory, a barrier and one load (a gather of rank 2 becomes
shuffles, many more instructions). Flat addresses put the low bits so that neither the store nor the
load has bank conflicts in the matrix units' layout of 4-byte results, and wrap around in their
highest bits, which a single "and" does.
"""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.products import INTERPRETED


@triton.jit
def _late():
    """0, which the compiler does not know: what is computed with it inside a loop is not computed
    before, where it would take registers for as long as the loop runs."""
    if INTERPRETED:  # noqa: SIM108
        zero = 0
    else:
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)
    return zero


@triton.jit
def laid_out_as(x, like):
    """x in the layout of `like`, both float32 [BM, BN]."""
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f,f", [x, like], tl.float32, True, 1)
    return x


@triton.jit
def skew(above, below, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN]: out[m, n] = [below | above][m, m - n + BN].

    Also its own inverse, up to which tile is new: with (ds, ds of the tile before) it gives G[m,
    c], the entries at distance d0 + c.
    """
    late = _late()
    both = tl.where(tl.arange(0, BN)[None, :] > (tl.arange(0, BM) + late)[:, None], below, above)
    mh = (tl.arange(0, BM // 8) + late)[:, None, None, None]
    ml = tl.arange(0, 8)[None, :, None, None]
    nh = tl.arange(0, BN // 8)[None, None, :, None]
    nl = tl.arange(0, 8)[None, None, None, :]
    t = ml - nl
    c = t & 7
    # address bits from low to high: m0 m1 m2 | c1 c2 | c0 | m_high | c_high
    at = (mh - nh + (t >> 3)) * (BM // 8 * 64) + mh * 64 + (c & 1) * 32 + (c >> 1) * 8 + ml
    at = at & (BM * BN - 1)
    both = tl.reshape(both, (BM // 8, 8, BN // 8, 4, 2))  # m_high m_low c_high c21 c0
    flat = tl.reshape(tl.permute(both, (2, 0, 4, 3, 1)), (BM * BN,))
    return tl.reshape(tl.gather(flat, tl.reshape(at, (BM * BN,)), axis=0), (BM, BN))


@triton.jit
def skew_transposed(above, below, BLOCK: tl.constexpr):
    """The same for transposed square tiles: out[n, m] = [below ; above][m - n + BLOCK, m]."""
    late = _late()
    both = tl.where((tl.arange(0, BLOCK) + late)[:, None] > tl.arange(0, BLOCK)[None, :], below, above)
    nh = (tl.arange(0, BLOCK // 8) + late)[:, None, None, None]
    nl = tl.arange(0, 8)[None, :, None, None]
    mh = tl.arange(0, BLOCK // 8)[None, None, :, None]
    ml = tl.arange(0, 8)[None, None, None, :]
    t = ml - nl
    # address bits from low to high: c0 c1 c2 | m1 m2 | m0 | m_high | c_high
    at = (mh - nh + (t >> 3)) * (BLOCK // 8 * 64) + mh * 64 + (ml & 1) * 32 + (ml >> 1) * 8 + (t & 7)
    at = at & (BLOCK * BLOCK - 1)
    both = tl.reshape(both, (BLOCK // 8, 8, BLOCK // 8, 4, 2))  # c_high c_low m_high m21 m0
    flat = tl.reshape(tl.permute(both, (0, 2, 4, 3, 1)), (BLOCK * BLOCK,))
    return tl.reshape(tl.gather(flat, tl.reshape(at, (BLOCK * BLOCK,)), axis=0), (BLOCK, BLOCK))
