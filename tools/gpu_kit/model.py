"""Clocks that a 64 x 64 tile of pairs takes one multiprocessor, measured and predicted.

Measured: seconds x clock of the multiprocessors x their number / tiles. A prediction is held if the
measurement is within a quarter of it.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from gpu_kit.cases import SAME_BITS
from gpu_kit.records import Row
from gpu_kit.work import Work

WITHIN = 0.25
LENGTHS = (2048, 8192, 1024, 512)  # the first that was measured counts
FLASH = "flash"
# As predictions name them; kernels that run, or run otherwise, only without atomics.
WITHOUT_ATOMICS = ("backward_queries, the same bits", "backward_table")
KERNELS = ("forward", "backward_queries", "backward_keys", *WITHOUT_ATOMICS, FLASH)


class Comparison(NamedTuple):
    """predicted: None where there is none. measured: None, then why not."""

    width: int
    kernel: str
    predicted: float | None
    unit: str
    measured: float | None
    why: str

    @property
    def held(self) -> bool | None:
        if self.predicted is None or self.measured is None:
            return None
        return abs(self.measured / self.predicted - 1) <= WITHIN


def clocks(microseconds: float, mhz: float, multiprocessors: int, tiles: int) -> float:
    """Of one tile."""
    return microseconds * mhz * multiprocessors / tiles


def read(path: Path, capability: int) -> dict[tuple[int, str], Row]:
    """bfloat16 predictions by (head width, kernel); none where there is no file."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    wanted = [row for row in rows if row["capability"] == capability and row["dtype"] == "bfloat16"]
    return {(row["width"], row["kernel"]): row for row in wanted}


def measured(rows: list[Row], width: int, kernel: str, multiprocessors: int) -> tuple[float | None, str]:
    """Of one kernel in the rows of the step `times`; None and why."""
    why = "not measured: call 1 did not get to it"
    for row in _candidates(rows, width, kernel):
        if row["state"] == "failed":
            why = f"not measured: {row['reason'][:60]}"
            continue
        found = row["forward" if kernel in ("forward", FLASH) else "forward+backward"]
        start = f"{kernel.partition(',')[0]}_kernel"
        us = sum(us for name, us in found.get("kernels", {}).items() if name.startswith(start))
        tiles = row.get("tiles") or Work(**row["work"]).tiles
        if us:
            return clocks(us, found["sm_mhz"], multiprocessors, tiles), ""
        why = f"not measured: the profiler saw no {start}"
    return None, why


def _candidates(rows: list[Row], width: int, kernel: str) -> list[Row]:
    ended = [row for row in rows if row.get("state") in ("measured", "failed")]
    if kernel == FLASH:
        return [
            row
            for row in ended
            if row["item"].startswith("flash kernel in Triton") and row["item"].endswith(f"D{width}")
        ]
    ours = SAME_BITS if kernel in WITHOUT_ATOMICS else "ours"
    names = [f"{ours}, B8 H16 L{n} M{n} D{width}" for n in LENGTHS]
    return [row for name in names for row in ended if row["item"] == name]


def compare(
    rows: list[Row], predictions: dict[tuple[int, str], Row], kernels: Any, multiprocessors: int
) -> list[Comparison]:
    found = []
    for width, kernel in kernels:
        row = predictions.get((width, kernel), {})
        value, why = measured(rows, width, kernel, multiprocessors)
        found.append(Comparison(width, kernel, row.get("clocks"), row.get("unit", ""), value, why))
    return found
