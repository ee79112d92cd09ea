"""What a run of the benchmarks prints: a header, and a table after pytest-benchmark's own."""

from typing import Any

from harness.case import disturbed
from harness.comparison import Comparison
from harness.machine import Machine

Row = dict[str, Any]


def header(machine: Machine) -> str:
    """What is compared with what, on which device and dtype, and how it is timed."""
    dtype = str(machine.dtype).removeprefix("torch.")
    ours = ", ".join(machine.backends_for_few_queries) or "no backend of its own here"
    threads = "" if machine.kind == "cuda" else f", {machine.threads} threads"
    others = "the original algorithm, SDPA and whole models"
    where = f"{machine.name}{threads}, {dtype}"
    return f"benchmarks: rel_attention ({ours}) against {others}; {where}; timed in turns, medians"


def table(comparison: Comparison, rows: dict[str, Row]) -> list[str]:
    """A line for each implementation."""
    first = next(iter(rows.values())).get("median_ms")
    per_token = comparison.case.unit == "token"
    lines = ["", comparison.title]
    lines += [f"  {name:<52}{_line(row, first, per_token)}" for name, row in rows.items()]
    said = disturbed(list(rows.values()))
    return [*lines, f"  disturbed: {said}"] if said else lines


def _line(row: Row, first: float | None, per_token: bool) -> str:
    if "median_ms" not in row:
        return f"{row['status']}: {row['error'].splitlines()[0][:120]}"
    low, high = row["quartiles_ms"]
    parts = [f"{row['median_ms']:>11.4g} ms  [{low:.4g}, {high:.4g}]"]
    parts += [f"{row['median_ms'] / first:>7.2f}x"] if first else []
    parts += [f"{row[key]:.0f} {unit}" for key, unit in (("gflops", "GFLOP/s"), ("gb_per_s", "GB/s")) if key in row]
    shares = (("share_of_operations", "of the peak"), ("share_of_bytes", "of a plain read"))
    parts += [f"{row[key]:.0%} {words}" for key, words in shares if key in row]
    parts += [f"(the paper: {row['paper_speedup']:,}x)"] if "paper_speedup" in row else []
    parts += [f"{row['peak_mib']:.0f} MiB"] if "peak_mib" in row else []
    parts += [f"{1e3 / row['median_ms']:,.4g} tokens/s"] if per_token else []
    return "  ".join(parts)
