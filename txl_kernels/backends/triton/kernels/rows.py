"""Tiles of rows: [ROWS, BLOCK_D], from memory and back, by pointers or by descriptors."""

import triton
import triton.language as tl

from txl_kernels.backends.triton.kernels.arguments import Place, Rows


@triton.jit
def place_of(bh, H):
    """The `Place` of a program."""
    bh = bh.to(tl.int64)
    return Place(bh, bh // H, bh % H)


@triton.jit
def rows_of(x, strides, place, first, last, layout):
    """`Rows` of x [B, H, rows, D] at a place. strides: of batch, head and row."""
    if not layout.TMA:
        x += place.b * strides[0] + place.h * strides[1]
    return Rows(x, strides[2], first, last, place.b, place.h)


@triton.jit
def packed_rows(x, place, L, layout):
    """`Rows` of a contiguous x [B * H, L, D]; a descriptor has [B, H, L, D]."""
    if not layout.TMA:
        x += place.bh * (tl.cast(L, tl.int64) * layout.D)
    return Rows(x, layout.D, 0, L, place.b, place.h)


@triton.jit
def _mask(rows, row0, ROWS: tl.constexpr, layout):
    """[ROWS, BLOCK_D]: rows inside [first, last) and, if BLOCK_D is not D, columns below D."""
    row = row0 + tl.arange(0, ROWS)
    mask = ((row >= rows.first) & (row < rows.last))[:, None]
    if layout.D != layout.BLOCK_D:
        mask = mask & (tl.arange(0, layout.BLOCK_D) < layout.D)[None, :]
    return mask


@triton.jit
def _pointers(rows, row0, ROWS: tl.constexpr, layout):
    """[ROWS, BLOCK_D] pointers from row0 on; offsets of 64 bits where 32 could overflow."""
    first = rows.at + tl.cast(row0, tl.int64) * rows.stride
    row = tl.arange(0, ROWS)
    if layout.WIDE:
        row = row.to(tl.int64)
    return first + (row[:, None] * rows.stride + tl.arange(0, layout.BLOCK_D)[None, :])


@triton.jit
def load_by_pointers(rows, row0, keep, ROWS: tl.constexpr, layout):
    """`load_rows` of `Rows` or a `Table` without descriptors."""
    mask = _mask(rows, row0, ROWS, layout)
    if keep is not None:
        mask = mask & keep[:, None]
    return tl.load(_pointers(rows, row0, ROWS, layout), mask=mask, other=0.0)


@triton.jit
def load_rows(rows, row0, keep, ROWS: tl.constexpr, layout):
    """[ROWS, BLOCK_D] from row0 on; zeros outside [first, last), and where keep is False.

    keep: bool [ROWS]; or None, as it must be with a descriptor.
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
    """Writes value [ROWS, BLOCK_D] from row0 on, inside [first, last), in the rows' dtype."""
    mask = _mask(rows, row0, ROWS, layout)
    pointers = _pointers(rows, row0, ROWS, layout)
    tl.store(pointers, value.to(rows.at.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(rows, row0, value, ROWS: tl.constexpr, layout):
    """Adds value, float32 [ROWS, BLOCK_D], from row0 on, inside [first, last), by atomics."""
    pointers = _pointers(rows, row0, ROWS, layout)
    tl.atomic_add(pointers, value, mask=_mask(rows, row0, ROWS, layout), sem="relaxed")
