"""Cost, relative to the plain call, of composed variants from other libraries' attention and of
terms beyond the paper's."""

import functools
from typing import Any

from harness.case import Case, Shape
from harness.comparison import Comparison, comparisons
from harness.machine import Machine
from implementations.methods import TERMS, Arguments, Method, Random, bidirectional, compared

SMALL = Shape(2, 2, 90, 300, 64)  # each variant gives other values


def _descending(shape: Shape, randn: Random) -> Arguments:
    return bidirectional(shape, randn, r_descending=True) | {"zero_row": shape.M + shape.L - 1}


def _table_for_each_row(shape: Shape, randn: Random) -> Arguments:
    return bidirectional(shape, randn) | {"r": randn(shape.B, shape.H, shape.M + 2 * shape.L - 1, shape.D)}


def _variant(name: str, **settings: Any) -> Method:
    return Method(name, functools.partial(bidirectional, **settings))


PLAIN = Method("plain", bidirectional, "ours")
WIDER = (_variant("values twice as wide", wider=2), _variant("values three times as wide", wider=3))
VARIANTS = (
    PLAIN,
    Method("r_descending", _descending),
    _variant("clamp, a table of 65 rows for all heads", rows=65, heads=1, outside="clamp"),
    _variant("r_bias", terms=(*TERMS, "r_bias")),
    _variant("r_bias alone", terms=("content_bias", "r_bias")),
    _variant("softcap", softcap=5.0),
    *WIDER,
    Method("a table for each batch row", _table_for_each_row),
    _variant("chunks of 64, 4 before", chunk=(64, 4)),
    _variant("window", window=(256, 64)),
    _variant("window and a prefix of 64", window=(256, 64), prefix=64),
)


@comparisons("cpu", "cuda")
def test_variants(machine: Machine, full: bool) -> list[Comparison]:
    shape = Shape(8, 16, 1024, 1024, 64) if machine.kind == "cuda" else Shape(4, 8, 512, 512, 64)
    case = Case(shape=shape, note="bidirectional")
    return compared("variants", machine, case, shape, SMALL, VARIANTS, 3)


@comparisons("cpu", "cuda")
def test_wide_values(machine: Machine, full: bool) -> list[Comparison]:
    """Values wider than keys, in Enformer's sizes: 64 columns for keys, 192 for values."""
    shape = Shape(8 if machine.kind == "cuda" else 1, 8, 1536, 0, 64)
    case = Case(shape=shape, note="bidirectional")
    return compared("variants", machine, case, shape, SMALL, (PLAIN, *WIDER), 3)
