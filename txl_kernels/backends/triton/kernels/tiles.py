"""Operations on tiles [ROWS, BLOCK_D]: loads and stores by pointers or descriptors, products, and
operations on scores."""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from txl_kernels.backends.triton.config import interpreted
from txl_kernels.backends.triton.kernels.arguments import BiasTable, Place, Rows, Table

INTERPRETED = tl.constexpr(interpreted())
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
PHILOX_ROUNDS = tl.constexpr(7)  # as in `txl_kernels.call`


@triton.jit
def place_of(bh, H):
    """Return the `Place` of a program."""
    bh = bh.to(tl.int64)
    return Place(bh, bh // H, bh % H)


@triton.jit
def key_place_of(place, group):
    """Return the `Place` of the keys that the query head of a place reads.

    group: the number of query heads that read one head of keys; None for 1.
    """
    h = place.h
    if group is not None:
        h = h // group
    return Place(place.bh, place.b, h)


@triton.jit
def multiple(stride, layout):
    """Return a stride that is a multiple of UNIT, in a form that shows this to the compiler."""
    if layout.UNIT > 1:
        stride = stride // layout.UNIT * layout.UNIT
    return stride


@triton.jit
def rows_of(x, strides, place, first, last, layout):
    """Return the `Rows` of x [B, H, rows, D] at a place. strides: of batch, head and row."""
    if not layout.TMA:
        x += place.b * multiple(strides[0], layout) + place.h * multiple(strides[1], layout)
    return Rows(x, multiple(strides[2], layout), first, last, place.b, place.h)


@triton.jit
def packed_rows(x, place, L, layout):
    """Return the `Rows` of a contiguous x [B * H, L, D]; a descriptor has [B, H, L, D]."""
    if not layout.TMA:
        x += place.bh * (tl.cast(L, tl.int64) * layout.D)
    return Rows(x, layout.D, 0, L, place.b, place.h)


@triton.jit
def _mask(rows, row0, ROWS: tl.constexpr, layout):
    """Return the mask [ROWS, BLOCK_D] of rows inside [first, last) and, if BLOCK_D is not D,
    columns below D."""
    row = row0 + tl.arange(0, ROWS)
    mask = ((row >= rows.first) & (row < rows.last))[:, None]
    if layout.D != layout.BLOCK_D:
        mask = mask & (tl.arange(0, layout.BLOCK_D) < layout.D)[None, :]
    return mask


@triton.jit
def _pointers(rows, row0, ROWS: tl.constexpr, layout):
    """Return pointers [ROWS, BLOCK_D] from row0 on, with 64-bit offsets where 32 bits could
    overflow."""
    first = rows.at + tl.cast(row0, tl.int64) * rows.stride
    row = tl.arange(0, ROWS)
    if layout.WIDE:
        row = row.to(tl.int64)
    return first + (row[:, None] * rows.stride + tl.arange(0, layout.BLOCK_D)[None, :])


@triton.jit
def load_by_pointers(rows, row0, keep, ROWS: tl.constexpr, layout):
    """Return the tile of `load_rows`, of `Rows` or a `Table` without descriptors."""
    mask = _mask(rows, row0, ROWS, layout)
    if keep is not None:
        mask = mask & keep[:, None]
    return tl.load(_pointers(rows, row0, ROWS, layout), mask=mask, other=0.0)


@triton.jit
def load_rows(rows, row0, keep, ROWS: tl.constexpr, layout):
    """Return the tile [ROWS, BLOCK_D] from row0 on, with zeros outside [first, last) and where keep
    is False.

    keep: bool [ROWS]; or None, which is required with a descriptor.
    """
    if layout.TMA:
        tl.static_assert(keep is None)
        tile = rows.at.load([rows.b.to(tl.int32), rows.h.to(tl.int32), row0 - rows.first, 0])
        value = tl.reshape(tile, (ROWS, layout.BLOCK_D))
    else:
        value = load_by_pointers(rows, row0, keep, ROWS, layout)
    return value


@triton.jit
def store_rows(rows, row0, value, ROWS: tl.constexpr, layout):
    """Store value [ROWS, BLOCK_D] from row0 on, inside [first, last), in the rows' dtype."""
    mask = _mask(rows, row0, ROWS, layout)
    pointers = _pointers(rows, row0, ROWS, layout)
    tl.store(pointers, value.to(rows.at.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(rows, row0, value, ROWS: tl.constexpr, layout):
    """Add value, float32 [ROWS, BLOCK_D], from row0 on, inside [first, last), by atomics."""
    pointers = _pointers(rows, row0, ROWS, layout)
    tl.atomic_add(pointers, value, mask=_mask(rows, row0, ROWS, layout), sem="relaxed")


@triton.jit
def table_of(R, r_head, r_row, h, sizes, layout):
    """Return the `Table` of r [H, T, D] at a head; of r [1, T, D] if r_head is None."""
    first = tl.cast(sizes.zero_row, tl.int64) * multiple(r_row, layout)
    if r_head is not None:
        first += h * multiple(r_head, layout)
    else:
        h = h * 0
    if not layout.TMA:
        R += first
    return Table(R, multiple(r_row, layout), -sizes.zero_row, sizes.T - sizes.zero_row, h)


@triton.jit
def load_distances(table, d0, keep, ROWS: tl.constexpr, layout):
    """Return the tile [ROWS, BLOCK_D] of r from distance d0 on, with zeros where r has no row and
    where keep is False.

    keep: bool [ROWS], or None.
    """
    if layout.TMA:
        tile = table.at.load([table.h.to(tl.int32), d0 - table.first, 0])
        value = tl.reshape(tile, (ROWS, layout.BLOCK_D))
        if keep is not None:
            value = tl.where(keep[:, None], value, 0.0)
    else:
        value = load_by_pointers(table, d0, keep, ROWS, layout)
    return value


@triton.jit
def bias_table_of(R_BIAS, rb_head, rb_row, h, sizes, sign, position_factor):
    """Return the `BiasTable` of `r_bias` [H, T] at a head."""
    at = R_BIAS + h * rb_head + tl.cast(sizes.zero_row, tl.int64) * rb_row
    factor = sign
    if position_factor is not None:
        factor = position_factor
    return BiasTable(at, rb_row, -sizes.zero_row, sizes.T - sizes.zero_row, factor)


@triton.jit
def in_table(table, table_bias, d0, COUNT: tl.constexpr):
    """Return whether any of the COUNT distances from d0 on has a row. table or table_bias may be
    None."""
    if table is not None:
        found = (d0 < table.last) & (d0 + COUNT > table.first)
    else:
        found = (d0 < table_bias.last) & (d0 + COUNT > table_bias.first)
    return found


@triton.jit
def sign_of(scale):
    """Return the scale's sign, 1, 0 or -1. A scale of 0 makes all scores 0."""
    return tl.where(scale > 0, 1.0, tl.where(scale < 0, -1.0, 0.0))


@triton.jit
def load_table_bias(table_bias, d0, COUNT: tl.constexpr):
    """Return relative biases float32 [COUNT] from distance d0 on, with zeros where the table has
    none."""
    d = d0 + tl.arange(0, COUNT)
    pointers = table_bias.at + d.to(tl.int64) * table_bias.stride
    value = tl.load(pointers, mask=(d >= table_bias.first) & (d < table_bias.last), other=0.0)
    return value.to(tl.float32) * table_bias.factor


@triton.jit
def load_bias(U, head_stride, h, layout):
    """Return a bias [H, D] at a head as float32 [BLOCK_D], with zeros from column D on."""
    d = tl.arange(0, layout.BLOCK_D)
    return tl.load(U + h * head_stride + d, mask=d < layout.D, other=0.0).to(tl.float32)


@triton.jit
def pinned(x):
    """Return x, an operand of a product. On AMD GPUs it gets the matrix units' layout, which takes
    many times the registers of the layout of loads, right before the product, and anew in each step
    of a loop: the compiler does not move assembly that has side effects."""
    if not INTERPRETED and is_hip():
        x = tl.inline_asm_elementwise("", "=v,0", [x], x.dtype, False, 32 // x.dtype.primitive_bitwidth)
    return x


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return a @ b (+ acc), float32. PRECISION: "ieee" or "tf32", for float32 operands."""
    if INTERPRETED:  # its product of bfloat16 reads the raw bits as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(pinned(a), pinned(b), acc, input_precision=PRECISION)


# The relative shift inside a tile, from [queries, distances] to [queries, keys], and the way back.
#
# A tile has queries m of [0, BM) and keys n of [0, BN), BM <= BN; d0 is the distance of (m, n) =
# (0, 0). Its pairs are at distances d0 + m - n, so they need the products with two blocks of BN
# distances: `above` starts at d0, `below` at d0 - BN. Pair (m, n) needs column (m - n) mod BN, of
# `above` where n <= m and of `below` where n > m. In row m these are the columns up to m of `above`
# and the other columns of `below`. So one select joins both blocks before anything is moved.
#
# A gather of rank 1 compiles to one store to shared memory, a barrier and one load (a gather of
# rank 2 becomes shuffles, with many more instructions). The low bits of the flat addresses are
# ordered so that neither the store nor the load has bank conflicts in the matrix units' layout of
# 4-byte results. The highest bits wrap around, by a single "and".


@triton.jit
def _opaque_zero(varying):
    """Return 0 in a form that the compiler cannot evaluate. It keeps the compiler from moving
    computations out of a loop, where their results would take registers for as long as the loop
    runs.

    varying: an int32 that changes in the loop. The assembly is declared pure, because Triton's
    pipeliner on Blackwell does not accept side effects.
    """
    zero = 0
    if not INTERPRETED:
        if is_hip():
            zero = tl.inline_asm_elementwise("v_mov_b32 $0, 0", "=v,v", [varying], tl.int32, True, 1)
        else:
            zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [varying], tl.int32, True, 1)
    return zero


@triton.jit
def laid_out_as(x, like):
    """Return x in the register layout of `like`, both float32 [BM, BN]."""
    if not INTERPRETED:
        if is_hip():
            x = tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v,v", [x, like], tl.float32, True, 1)
        else:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f,f", [x, like], tl.float32, True, 1)
    return x


@triton.jit
def skew(above, below, varying, BM: tl.constexpr, BN: tl.constexpr):
    """Return the skewed tile [BM, BN]: out[m, n] = [below | above][m, m - n + BN].

    It also unskews: of dS of a tile and dS of the tile before, it returns G[m, c], the entries at
    distance d0 + c.
    """
    zero = _opaque_zero(varying)
    both = tl.where(tl.arange(0, BN)[None, :] > (tl.arange(0, BM) + zero)[:, None], below, above)
    mh = (tl.arange(0, BM // 8) + zero)[:, None, None, None]
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
def skew_transposed(above, below, varying, BLOCK: tl.constexpr):
    """Return the skewed tile of transposed square tiles: out[n, m] = [below ; above][m - n + BLOCK,
    m]."""
    zero = _opaque_zero(varying)
    both = tl.where((tl.arange(0, BLOCK) + zero)[:, None] > tl.arange(0, BLOCK)[None, :], below, above)
    nh = (tl.arange(0, BLOCK // 8) + zero)[:, None, None, None]
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


@triton.jit
def position_scores(queries, table, table_bias, d0, BN: tl.constexpr, PRECISION: tl.constexpr, layout):
    """Return the positional scores [BM, BN] of queries at the distances d0 .. d0 + BN - 1, float32.

    table_bias: None, or a bias for each distance. layout: of r.
    """
    r = load_distances(table, d0, None, BN, layout)  # [BN, BLOCK_DP]
    scores = times(dot(queries.qw, tl.trans(r), None, PRECISION), queries.position_factor)
    if table_bias is not None:
        scores = add_unfused(scores, load_table_bias(table_bias, d0, BN)[None, :])
    return scores


@triton.jit
def times(scores, factor):
    """Return scores * factor; scores where factor is None."""
    if factor is not None:
        scores *= factor
    return scores


@triton.jit
def bias_of_pairs(table_bias, d0, BM: tl.constexpr, BN: tl.constexpr):
    """Return the relative bias of each pair, [BM, BN], at distance d0 + m - n. BM <= BN."""
    window = load_table_bias(table_bias, d0 - BN, 2 * BN)
    at = (tl.arange(0, BM) + _opaque_zero(d0))[:, None] - tl.arange(0, BN)[None, :] + BN
    return tl.reshape(tl.gather(window, tl.reshape(at, (BM * BN,)), axis=0), (BM, BN))


@triton.jit
def bias_of_pairs_transposed(table_bias, d0, BLOCK: tl.constexpr):
    """Return the transposed `bias_of_pairs`, [BLOCK, BLOCK]: out[n, m]."""
    window = load_table_bias(table_bias, d0 - BLOCK, 2 * BLOCK)
    at = tl.arange(0, BLOCK)[None, :] - (tl.arange(0, BLOCK) + _opaque_zero(d0))[:, None] + BLOCK
    return tl.reshape(tl.gather(window, tl.reshape(at, (BLOCK * BLOCK,)), axis=0), (BLOCK, BLOCK))


@triton.jit
def add_unfused(scores, table_bias):
    """Return scores + table_bias, added after the product that gives the scores.

    Biases repeat in a tile. If they were the product's accumulator on sm_90, each copy would take a
    register of its own, because of the fence before the product.
    """
    return tl.fma(scores, 1.0, table_bias)


@triton.jit
def capped(s, to_cap):
    """Return tanh(s * to_cap), float32, with an error of a few units in the last place; NaN for
    NaN."""
    x = s * to_cap
    size = tl.abs(x)
    z = x * x
    # Near 0 a polynomial, fitted to tanh(x) / x on [0, 0.6], avoids the cancellation in 1 - e.
    p = ((-0.005893945 * z + 0.020794618) * z - 0.053783293) * z + 0.133319153
    near = x + x * z * (p * z - 0.333332975)
    e = tl.math.exp2(size * -2.8853900817779268)  # exp(-2 size)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(size < 0.6, near, tl.where(x < 0, -far, far))


@triton.jit
def weights(s, scale_log2, top, lse2):
    """Return the weights exp2((s - top) * scale_log2 - lse2), limited to 1; NaN for NaN.

    s: scores, float32, capped if there is a cap. top, lse2: see `prepare_kernel`. The limit is
    needed where another kernel summed a score in another order: for huge scores the difference is
    not small, and exp2 of it has no bound.
    """
    return tl.math.exp2(tl.minimum((s - top) * scale_log2 - lse2, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def sink_exponent(sink, top, scale_log2):
    """Return log2 of the weight of a sink relative to that of a score `top`, in the units of
    scores."""
    return (sink - top * (scale_log2 * LN2)) * LOG2E


# Dropout bits, a function of seed, (b, h), query and key; see `txl_kernels.call`.


@triton.jit
def _kept_eight(dropout, group, key):
    """Return whether entries are kept, for each (group of eight queries, key): eight bools, in
    three axes of 2."""
    zero = tl.zeros_like(group + key)
    w0, w1, w2, w3 = tl.philox(
        dropout.seed, zero + key, zero + group, zero + dropout.bh.to(tl.int32), zero, PHILOX_ROUNDS
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    below = dropout.drop_below.to(tl.uint32) << 16
    return tl.join(words << 16 >= below, words >= below)  # the low 16 bits, then the high ones


@triton.jit
def keep_mask(dropout, m0, key0, BM: tl.constexpr, BN: tl.constexpr):
    """Return the mask of kept entries, bool [BM, BN], of the tile at query m0 (a multiple of 8) and
    key0."""
    group = (m0 // 8 + tl.arange(0, BM // 8))[:, None]  # [BM / 8, 1]
    key = (key0 + tl.arange(0, BN))[None, :]  # [1, BN]
    eight = tl.reshape(_kept_eight(dropout, group, key), (BM // 8, BN, 8))
    return tl.reshape(tl.permute(eight, (0, 2, 1)), (BM, BN))


@triton.jit
def keep_mask_transposed(dropout, m0, key0, BM: tl.constexpr, BN: tl.constexpr):
    """Return the transposed `keep_mask`, bool [BN, BM]."""
    group = (m0 // 8 + tl.arange(0, BM // 8))[None, :]  # [1, BM / 8]
    key = (key0 + tl.arange(0, BN))[:, None]  # [BN, 1]
    return tl.reshape(_kept_eight(dropout, group, key), (BN, BM))
