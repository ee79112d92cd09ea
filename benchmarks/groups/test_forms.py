"""Cost, relative to the plain call, of composed variants from other libraries' attention and of
terms beyond the paper's."""

import functools
from typing import Any

from harness.case import Case, Shape
from harness.comparison import Comparison, comparisons
from harness.machine import Machine
from implementations.ways import TERMS, Arguments, Random, Way, bidirectional, compared

SMALL = Shape(2, 2, 90, 300, 64)  # each form gives other values


def _descending(shape: Shape, randn: Random) -> Arguments:
    return bidirectional(shape, randn, r_descending=True) | {"zero_row": shape.M + shape.L - 1}


def _table_for_each_row(shape: Shape, randn: Random) -> Arguments:
    return bidirectional(shape, randn) | {"r": randn(shape.B, shape.H, shape.M + 2 * shape.L - 1, shape.D)}


def _form(name: str, **settings: Any) -> Way:
    return Way(name, functools.partial(bidirectional, **settings))


PLAIN = Way("plain", bidirectional, "ours")
WIDER = (_form("values twice as wide", wider=2), _form("values three times as wide", wider=3))
FORMS = (
    PLAIN,
    Way("r_descending", _descending),
    _form("clamp, a table of 65 rows for all heads", rows=65, heads=1, outside="clamp"),
    _form("r_bias", terms=(*TERMS, "r_bias")),
    _form("r_bias alone", terms=("content_bias", "r_bias")),
    _form("softcap", softcap=5.0),
    *WIDER,
    Way("a table for each batch row", _table_for_each_row),
    _form("chunks of 64, 4 before", chunk=(64, 4)),
    _form("window", window=(256, 64)),
    _form("window and a prefix of 64", window=(256, 64), prefix=64),
)


@comparisons("cpu", "cuda")
def test_forms(machine: Machine, full: bool) -> list[Comparison]:
    shape = Shape(8, 16, 1024, 1024, 64) if machine.kind == "cuda" else Shape(4, 8, 512, 512, 64)
    case = Case(shape=shape, note="bidirectional")
    return compared("forms", machine, case, shape, SMALL, FORMS, 3)


@comparisons("cpu", "cuda")
def test_wide_values(machine: Machine, full: bool) -> list[Comparison]:
    """Values wider than keys, in Enformer's sizes: 64 columns for keys, 192 for values."""
    shape = Shape(8 if machine.kind == "cuda" else 1, 8, 1536, 0, 64)
    case = Case(shape=shape, note="bidirectional")
    return compared("forms", machine, case, shape, SMALL, (PLAIN, *WIDER), 3)
