"""How figures and tables are written."""

import textwrap
from typing import Any

from report.records import Measured

Row = dict[str, Any]


def number(x: float) -> str:
    """Three significant digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}".rstrip(".")


def times(ratio: float) -> str:
    return f"{number(ratio)}x"


def spread(row: Row) -> str:
    """Median milliseconds with quartiles, or what happened instead."""
    if "median_ms" not in row:
        return str(row["status"])
    low, high = row["quartiles_ms"]
    return f"{number(row['median_ms'])} [{number(low)}, {number(high)}]"


def prose(text: str, indent: str = "") -> list[str]:
    """Lines of at most 100 columns; indent: of all but the first."""
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """In markdown; numbers, that is all but the first column, to the right."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] + ["---:"] * (len(head) - 1), *rows)]


def sources(found: list[Measured]) -> str:
    """Dates, commits and versions behind figures."""
    said = []
    for about in (measured.about for measured in found):
        changed = " with changes" if about["uncommitted_changes"] else ""
        said.append(
            f"{about['date'][:10]}, commit {about['commit']}{changed}, torch {about['torch']}, {about['dtype']}"
        )
    return "; ".join(dict.fromkeys(said))
