"""Named groups of arguments that the kernels' functions pass to each other.

Kernels themselves take flat arguments and build these at their top: inside a tuple Triton compiles
anew for integers that are 1 or multiples of 16, whatever `do_not_specialize` says, and 3.6 launches
no descriptor. Constants and None are lost where a function returns them, so tuples with such fields
are built in kernels: only there, as 3.6 tells constant tuples apart by their address.
"""

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """Integers of a call, as in `Plan`."""

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
    """Batch row and head of a program, 64 bits; bh is b * H + h."""

    bh: Any
    b: Any
    h: Any


class Layout(NamedTuple):
    """Constants of tiles of rows: D columns in memory, BLOCK_D in a tile.

    WIDE: whether offsets inside a tile need 64 bits. TMA: whether descriptors load tiles; stores
    always take pointers. UNIT: elements of which all strides are multiples, for vectorized loads:
    Triton itself looks for multiples of 16 only.
    """

    D: Any
    BLOCK_D: Any
    WIDE: Any
    TMA: Any
    UNIT: Any


class Rows(NamedTuple):
    """Rows of one (b, h). Those outside [first, last) are not read, and are zeros in a tile.

    at: pointer to row 0; or a descriptor of [B, H, rows, D] that starts at row `first` and ends at
    `last`, which alone needs b and h.
    """

    at: Any
    stride: Any
    first: Any
    last: Any
    b: Any
    h: Any


class Table(NamedTuple):
    """r of one head, its rows counted by distance. Those outside [first, last) are not read.

    at: pointer to distance 0; or a descriptor of [H, rows, D], which alone needs h.
    """

    at: Any
    stride: Any
    first: Any
    last: Any
    h: Any


class BiasTable(NamedTuple):
    """`r_bias` of one head, counted by distance. Those outside [first, last) are not read.

    at: pointer to distance 0. sign: of the scale, which they get as queries do.
    """

    at: Any
    stride: Any
    first: Any
    last: Any
    sign: Any


class TableGradient(NamedTuple):
    """dr of one head by atomics: `Rows` of float32 [T, D], and the scale of what they get."""

    rows: Any
    scale: Any


class BiasTableGradient(NamedTuple):
    """The same of `r_bias`: pointer to float32 at distance 0, and which there are."""

    at: Any
    first: Any
    last: Any
    scale: Any


class Source(NamedTuple):
    """Keys and values of memory or segment: tiles start at row `start`, row 0 is key `shift`."""

    k: Any  # Rows
    v: Any  # Rows
    start: Any
    shift: Any


class Visible(NamedTuple):
    """The keys that a block of BM queries sees: query m the keys of [low[m], high[m]), both int32
    [BM].

    low = high = 0: none. Some query sees the keys first and last - 1; all see every key of
    [all_from, all_to).
    """

    low: Any
    high: Any
    first: Any
    last: Any
    all_from: Any
    all_to: Any


class Queries(NamedTuple):
    """A block of queries: qu and qw [BM, BLOCK_D]; the first, m0, stands at key position `at`.

    scale_log2 is of what `capped` leaves, if there is a to_cap and not None.
    """

    qu: Any
    qw: Any
    m0: Any
    at: Any
    scale_log2: Any
    to_cap: Any


class Upstream(NamedTuple):
    """The inputs of backward for each query: dout [BM, BLOCK_D]; top and lse2, for `weights`, and
    delta: float32 [BM]."""

    dout: Any
    top: Any
    lse2: Any
    delta: Any


class Dropout(NamedTuple):
    """Seed and place of a program's random bits; the rest as in `Plan`. None: no dropout."""

    seed: Any
    bh: Any
    drop_below: Any
    keep_scale: Any
