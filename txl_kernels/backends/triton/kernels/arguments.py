"""Named groups of arguments that the kernels' functions pass to each other.

Kernels themselves take flat arguments and build these tuples at their top. Inside a tuple argument,
Triton specializes integers that are 1 or multiples of 16, whatever `do_not_specialize` says, and
Triton 3.6 does not launch with descriptors. Constants and None are lost in a tuple that a function
returns, so tuples with such fields are built in kernels. They are built only there, because Triton
3.6 identifies constant tuples by their address.
"""

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """The integers of a call, as in `Plan`."""

    H: Any
    L: Any
    M: Any
    T: Any
    zero_row: Any
    left: Any
    right: Any


class Bounds(NamedTuple):
    """`start` and `end`: pointers to int32 [B, L], or None, and their strides."""

    start: Any
    start_batch: Any
    start_query: Any
    end: Any
    end_batch: Any
    end_query: Any


class Place(NamedTuple):
    """The batch row b and head h of a program, int64; bh is b * H + h for a head of queries."""

    bh: Any
    b: Any
    h: Any


class Layout(NamedTuple):
    """Constants of tiles of rows, which have D columns in memory and BLOCK_D in a tile.

    WIDE: whether offsets inside a tile need 64 bits. TMA: whether descriptors load tiles; stores
    always use pointers. UNIT: a number of elements that divides all strides, for vectorized loads;
    Triton itself recognises only multiples of 16.
    """

    D: Any
    BLOCK_D: Any
    WIDE: Any
    TMA: Any
    UNIT: Any


class Rows(NamedTuple):
    """Rows of a tensor at one (b, h). Rows outside [first, last) are not read, and are zeros in a
    tile.

    at: a pointer to row 0; or a descriptor of [B, H, rows, D] that starts at row `first` and ends
    at `last`. Only a descriptor needs b and h.
    """

    at: Any
    stride: Any
    first: Any
    last: Any
    b: Any
    h: Any


class Table(NamedTuple):
    """The table r of one head, with rows indexed by distance. Rows outside [first, last) are not
    read.

    at: a pointer to distance 0; or a descriptor of [H, rows, D], which alone needs h.
    """

    at: Any
    stride: Any
    first: Any
    last: Any
    h: Any


class BiasTable(NamedTuple):
    """The table `r_bias` of one head, indexed by distance. Distances outside [first, last) are not
    read.

    at: a pointer to distance 0. factor: what biases are multiplied by, see `Queries`; without
    `position_factor` the scale's sign, by which queries are multiplied, too.
    """

    at: Any
    stride: Any
    first: Any
    last: Any
    factor: Any


class TableGradient(NamedTuple):
    """The sum of one head's dr by atomics: `Rows` of float32 [T, D], and the factor of what is
    added."""

    rows: Any
    scale: Any


class BiasTableGradient(NamedTuple):
    """The sum of one head's gradient of `r_bias` by atomics.

    at: a pointer to float32 at distance 0. first, last: the range of distances. scale: the factor
    of what is added.
    """

    at: Any
    first: Any
    last: Any
    scale: Any


class Source(NamedTuple):
    """Keys and values of the memory or the segment. Tiles start at row `start`; row 0 is key
    `shift`."""

    k: Any  # Rows
    v: Any  # Rows
    start: Any
    shift: Any


class Visible(NamedTuple):
    """The keys that a block of BM queries sees: query m sees the keys [low[m], high[m]), both int32
    [BM].

    low = high = 0 for a query that sees no key. first and last - 1 are the first and last key that
    any of the queries sees. All of them see every key of [all_from, all_to).
    """

    low: Any
    high: Any
    first: Any
    last: Any
    all_from: Any
    all_to: Any


class Queries(NamedTuple):
    """A block of queries: qu [BM, BLOCK_D] and qw [BM, BLOCK_DP]. The first is query m0, at key
    position `at`.

    scale_log2 is the factor of scores, or of capped scores if to_cap is not None. position_factor
    is the factor of the products with r, relative to those with keys; None for 1.
    """

    qu: Any
    qw: Any
    m0: Any
    at: Any
    scale_log2: Any
    to_cap: Any
    position_factor: Any


class Upstream(NamedTuple):
    """The inputs of backward for each query: dout [BM, BLOCK_D]; top and lse2 (see `weights`) and
    delta, float32 [BM]."""

    dout: Any
    top: Any
    lse2: Any
    delta: Any


class Dropout(NamedTuple):
    """The arguments of dropout, or None in place of this tuple. seed and bh select a program's
    random bits; the others are as in `Plan`."""

    seed: Any
    bh: Any
    drop_below: Any
    keep_scale: Any
