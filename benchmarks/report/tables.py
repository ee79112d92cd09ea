"""Tables of comparisons, as the report and docs/speed.md have them."""

import textwrap
from dataclasses import replace

from harness.case import SPEED_UP, Row
from report import charts
from report.records import Measured

# Groups of comparisons of two implementations, another library's and this package's.
LAYERS = "other libraries' layers"
_ENCODERS = "other libraries' encoders"
LIBRARIES = (
    LAYERS,
    f"peak memory of {LAYERS}",
    f"streaming steps of {LAYERS}",
    _ENCODERS,
    f"peak memory of {_ENCODERS}",
)
PAIRS = (*LIBRARIES, "generate()")  # the latter until commit 6c4a063f37
MAX_CASES = 3  # of a table in docs/speed.md, so that it fits into a page
ORIGINAL = "Transformer-XL, original algorithm, segments of 128"


def number(x: float) -> str:
    """Format a number with three significant digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}".rstrip(".")


def prose(text: str) -> list[str]:
    """Wrap text to lines of at most 100 columns."""
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def pivot(head: str, cells: dict[tuple[str, str], str]) -> list[str]:
    """Format cells by row and column as a table, in the order in which these first appear."""
    rows, columns = (dict.fromkeys(key[n] for key in cells) for n in (0, 1))
    lines = [[head, *columns], ["---", *("---:" for _ in columns)]]
    lines += [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    return ["", *("| " + " | ".join(line) + " |" for line in lines), ""]


def sources(found: list[Measured]) -> str:
    """List dates, commits and versions of the given measurements."""
    said = (
        f"{about['date'][:10]}, commit {about['commit']}{' with changes' * about['uncommitted_changes']}, "
        f"torch {about['torch']}, {about['dtype']}"
        for about in (measured.about for measured in found)
    )
    return "; ".join(dict.fromkeys(said))


def in_full(found: list[Measured], of_page: bool = False) -> list[str]:
    """Format tables of comparisons, those of the same group, direction and model side by side: a
    row for each implementation, including failed ones. of_page: only the first cases, without
    quartiles."""
    tables: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    lines = []
    for measured in found:
        case, first = measured.case, next(iter(measured.rows.values()))
        cells = tables.setdefault((measured.group, str(case.direction), str(case.network)), {})
        if of_page and len({column for _, column in cells}) == MAX_CASES:
            continue
        cells |= {(name, str(case)): cell(row, first, spread=not of_page) for name, row in measured.rows.items()}
        if measured.disturbed:
            lines += [*prose(f"*disturbed: {case}: {measured.disturbed}.*"), ""]
    return [line for (group, *_), cells in tables.items() for line in pivot(group, cells)] + lines


def cell(row: Row, first: Row, spread: bool) -> str:
    """Format time or peak memory, its multiple of the first implementation's, and the share of the
    limit; or the reason why there is no measurement. spread: with quartiles."""
    if "median_ms" not in row:
        return f"{row['status']}: {row['error'].splitlines()[0][:100]}".replace("|", "/")
    key = "peak_mib" if "peak_mib" in row else "median_ms"
    unit = " MiB" if key == "peak_mib" else " [{}, {}]".format(*map(number, row["quartiles_ms"])) if spread else ""
    parts = [f"{number(row[key])}{unit}"]
    parts += [f"{number(row[key] / first[key])}x"] if first.get(key) and row is not first and "limit" not in row else []
    parts += share(row)
    parts += [f"{number(row['gflops'])} GFLOP/s"] if row.get("limit") == "operations" else []
    parts += [f"{number(row['gb_per_s'])} GB/s"] if row.get("limit") == "bytes" else []
    return ", ".join(parts)


def share(row: Row) -> list[str]:
    """Format the share of the machine's limit, as no or one word."""
    return [f"{row[name]:.0%}" for name in ("share_of_operations", "share_of_bytes") if name in row]


def speed_ups(found: list[Measured]) -> list[str]:
    """Format Table 9 for each model: the paper's speed-up, txl's share of the peak, and for each
    other implementation txl's speed-up over it and its share."""
    lines = []
    for network in dict.fromkeys(measured.case.network for measured in found):
        cells: dict[tuple[str, str], str] = {}
        chosen = [measured for measured in found if measured.case.network == network]
        for measured in chosen:
            length = f"{measured.case.attn_len:,}"
            cells[length, "the paper"] = f"{SPEED_UP[measured.case.attn_len]:,}x"
            if shares := [word for mine in measured.ours() for word in share(mine)]:
                cells[length, "ours, of the peak"] = " / ".join(shares)
            for name, row in measured.rows.items():
                if row["role"] not in ("ours", "limit"):
                    said = " / ".join(f"{number(x)}x" for x in measured.speed_ups(row))
                    cells[length, f"over {name}"] = ", ".join([said or str(row["status"]), *share(row)])
        segments = " / ".join(str(mine["segment"]) for mine in chosen[0].ours())
        title = f"Evaluation, {network}, speed-up per token (Table 9), ours in segments of {segments} tokens:"
        lines += ["", *prose(title), *pivot("attention length", cells)]
    return lines


def evaluation(found: list[Measured]) -> list[str]:
    """Format Table 9 for docs/speed.md: the speed-up over the vanilla model as published, over the
    fastest one, and over the original algorithm."""
    cells: dict[tuple[str, str], str] = {}
    for measured in sorted(found, key=lambda measured: -measured.case.attn_len):
        length = f"{measured.case.attn_len:,}"
        cells[length, "the paper, over its own"] = f"{SPEED_UP[measured.case.attn_len]:,}x"
        for column, row in (
            ("over vanilla as published", measured.find(implementation=charts.PUBLISHED)),
            ("over the fastest vanilla", charts.fastest(measured)),
            ("over the original algorithm", measured.find(implementation=ORIGINAL)),
        ):
            cells[length, column] = " / ".join(f"{number(x)}x" for x in measured.speed_ups(row))
        cells[length, "ours, % of peak FLOP/s"] = " / ".join(word for mine in measured.ours() for word in share(mine))
    segments = " / ".join(str(mine["segment"]) for mine in found[0].ours())
    title = (
        f"Speed-up per token (Table 9), {found[0].case.network}, ours in segments of {segments} tokens. A vanilla model "
        "reads its window anew for each token; the original algorithm has a memory, in segments of 128."
    )
    return ["", *prose(title), *pivot("attention length", cells)]


def pairs(found: list[Measured]) -> list[str]:
    """Format pairs of another library's implementation and this package's: a table for each group
    and direction, a row for each model."""
    tables: dict[str, dict[tuple[str, str], str]] = {}
    for measured in found:
        case, key = measured.case, "peak_mib" if measured.group.startswith("peak memory") else "median_ms"
        theirs, ours = measured.find(role="other"), measured.find(role="ours")
        if theirs and ours:
            cell = f"{theirs['status']} / {ours['status']}"
            if key in theirs and key in ours:
                cell = f"{number(theirs[key])} / {number(ours[key])} ({number(theirs[key] / ours[key])}x)"
            what = f"{case.direction or 'a token'}, {'MiB' if key == 'peak_mib' else 'milliseconds'}"
            cells = tables.setdefault(f"{measured.group}, {what}, theirs / ours (as a multiple)", {})
            cells[case.network, replace(case, model=None, layers=None, direction=None).work] = cell
    return [line for title, cells in tables.items() for line in ("", f"{title}:", *pivot("", cells))]
