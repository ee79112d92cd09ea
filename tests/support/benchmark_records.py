"""Made-up records of benchmarks."""

import json
from pathlib import Path
from typing import Any

ABOUT = {
    "schema": 3, "kind": "cpu", "device": "A processor", "threads": 2, "isa": "avx2", "torch": "2.13.0",
    "dtype": "float32", "commit": "abc", "uncommitted_changes": False,
}  # fmt: skip
SHAPE = {"B": 1, "H": 1, "L": 1, "M": 1, "D": 1}


def row(group: str, case: dict[str, Any], name: str, ms: float | None = None, **more: Any) -> dict[str, Any]:
    """Make a row of a record; ms: None for a failed one. The role is "other" unless `more` has
    another."""
    fields = {"group": group, "case": case, "implementation": name, "role": "other"}
    if ms is None:
        return fields | {"status": "failed"} | more
    return fields | {"status": "measured", "median_ms": ms, "quartiles_ms": [ms, ms], "rounds": 5} | more


def ours(group: str, case: dict[str, Any], name: str, ms: float, **more: Any) -> dict[str, Any]:
    return row(group, case, name, ms, role="ours", **more)


def write(folder: Path, date: str, rows: list[dict[str, Any]], **about: Any) -> Path:
    """Write a record; return its file."""
    path = folder / f"{date}.json"
    path.write_text(json.dumps({"about": ABOUT | {"date": date} | about, "rows": rows}))
    return path
