"""Documents made from records: the report's tables, and the figures in the README and docs."""

import re
import textwrap
from dataclasses import replace
from pathlib import Path

from harness.case import SPEED_UP, Row
from report import charts
from report.records import Device, Measured, ratio

HERE = Path(__file__).parents[1]
REPORT, PLOTS = HERE / "REPORT.md", HERE / "plots"
README, DOCS = HERE.parent / "README.md", HERE.parent / "docs"
SPEED, ACCELERATE = DOCS / "speed.md", DOCS / "how-to" / "accelerate.md"
BEGIN, END = "<!-- figures: written by `make report` -->", "<!-- end of figures -->"
INTRODUCTION = """# Benchmarks

Written by `make report` from the records in `results/`; not edited by hand. How to measure:
`pytest benchmarks/ --benchmark-only` (`--full` for the paper's sizes), in which implementations run
in turns, each compared with a float64 reference before it is timed.
"""
LEGEND = """A cell holds the median of the rounds in milliseconds, with quartiles in brackets; the time as a multiple
of the first implementation's; and the share of the limit that was measured in the same comparison.
For operations the limit is multiply-adds in registers (on a GPU, the library's matrix product), and
only visible pairs count; for bytes it is a plain read (a copy) of those that must be read. A limit
does the same work in every round: if its median is over 1.2 times its fastest round, other work
disturbed the comparison, and no shares are given. Nor are they where the limit's row says that it
multiplied zeros, because AMX does so faster than it multiplies other numbers. MiB are peak memory
beyond the inputs (of a model, beyond the parameters).
"""
# Groups of comparisons of two implementations, another library's and this package's.
_LAYERS = "other libraries' layers"
_ENCODERS = "other libraries' encoders"
LIBRARIES = (
    _LAYERS,
    f"peak memory of {_LAYERS}",
    f"streaming steps of {_LAYERS}",
    _ENCODERS,
    f"peak memory of {_ENCODERS}",
)
PAIRS = (*LIBRARIES, "generate()")  # the latter until commit 6c4a063f37
# Groups that docs/speed.md shows besides evaluation; softmax was measured until commit f2a9f98.
SHOWN = ("attention", "Inkling", "decode", "training step", "softmax", "peak memory", "padding", "call overhead",
         "start-up")  # fmt: skip


def texts(devices: list[Device]) -> dict[Path, str]:
    """Return the required contents of the report, the README and the pages with figures."""
    return {
        REPORT: _joined([INTRODUCTION, LEGEND, *(line for device in devices for line in section(device))]),
        README: _with_figures(README, headline(devices)),
        SPEED: _with_figures(SPEED, [LEGEND, *(line for device in devices for line in summary(device))]),
        ACCELERATE: _with_figures(ACCELERATE, libraries(devices)),
    }


def _with_figures(path: Path, lines: list[str]) -> str:
    """Return a document's text with these lines between its markers."""
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n\n{_joined(lines)}\n{END}{rest.split(END)[1]}"


def _joined(lines: list[str]) -> str:
    """Join lines, with no more than one blank line in succession."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def write(devices: list[Device]) -> list[Path]:
    """Write the documents and plots whose content has changed; return their paths."""
    wanted = {path: text.encode() for path, text in texts(devices).items()}
    for device in devices:
        wanted |= {PLOTS / name: png for name, png in charts.draw(device).items()}
    changed = [path for path, data in wanted.items() if not path.exists() or path.read_bytes() != data]
    for path in changed:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(wanted[path])
    return changed


def number(x: float) -> str:
    """Format a number with three significant digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}".rstrip(".")


def prose(text: str, indent: str = "") -> list[str]:
    """Wrap text to lines of at most 100 columns; indent: of all lines but the first."""
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


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


def section(device: Device) -> list[str]:
    """Format all measurements of one machine, with its plots."""
    lines, pictures = ["", f"## {device.name}", "", *prose(device.note)], charts.names(device)
    for group in dict.fromkeys(measured.group for measured in device.comparisons):
        found = device.group(group)
        lines += ["", f"### {group[0].upper()}{group[1:]}", "", *prose(f"{sources(found)} where nothing else is said.")]
        lines += speed_ups(found) if group == "evaluation speed" else []
        lines += pairs(found) if group in PAIRS else in_full(found)
        lines += [f"\n![{group}](plots/{name})" for name in pictures.get(group, [])]
    return lines


def summary(device: Device) -> list[str]:
    """Format one machine's part of docs/speed.md."""
    base = [x for x in device.group("evaluation speed") if x.case.model == "enwik8-base"]
    found = [x for group in SHOWN for x in device.group(group) if group != "peak memory" or x.case.model]
    lines = ["", *prose(f"**{device.name}** ({sources([*base, *found])}; medians, implementations in turns)")]
    return [*lines, "", *prose(device.note), *speed_ups(base), *in_full(found)]


def in_full(found: list[Measured]) -> list[str]:
    """Format tables of comparisons, those of the same group, direction and model side by side: a
    row for each implementation, including failed ones."""
    tables: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    lines = []
    for measured in found:
        case, first = measured.case, next(iter(measured.rows.values()))
        cells = tables.setdefault((measured.group, str(case.direction), str(case.network)), {})
        cells |= {(name, str(case)): cell(row, first) for name, row in measured.rows.items()}
        if measured.disturbed:
            lines += [*prose(f"*disturbed: {case}: {measured.disturbed}.*"), ""]
    return [line for (group, *_), cells in tables.items() for line in pivot(group, cells)] + lines


def cell(row: Row, first: Row) -> str:
    """Format time or peak memory, its multiple of the first implementation's, and the share of the
    limit; or the reason why there is no measurement."""
    if "median_ms" not in row:
        return f"{row['status']}: {row['error'].splitlines()[0][:100]}".replace("|", "/")
    key = "peak_mib" if "peak_mib" in row else "median_ms"
    spread = "[{}, {}]".format(*map(number, row["quartiles_ms"]))
    parts = [f"{number(row[key])} {'MiB' if key == 'peak_mib' else spread}"]
    parts += [f"{number(row[key] / first[key])}x"] if first.get(key) and row is not first and "limit" not in row else []
    parts += _share(row)
    parts += [f"{number(row['gflops'])} GFLOP/s"] if row.get("limit") == "operations" else []
    parts += [f"{number(row['gb_per_s'])} GB/s"] if row.get("limit") == "bytes" else []
    return ", ".join(parts)


def _share(row: Row) -> list[str]:
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
            if shares := [share for mine in measured.ours() for share in _share(mine)]:
                cells[length, "ours, of the peak"] = " / ".join(shares)
            for name, row in measured.rows.items():
                if row["role"] not in ("ours", "limit"):
                    said = " / ".join(f"{number(x)}x" for x in measured.speed_ups(row))
                    cells[length, f"over {name}"] = ", ".join([said or str(row["status"]), *_share(row)])
        segments = " / ".join(str(mine["segment"]) for mine in chosen[0].ours())
        title = f"Evaluation, {network}, speed-up per token (Table 9), ours in segments of {segments} tokens:"
        lines += ["", *prose(title), *pivot("attention length", cells)]
    return lines


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


def libraries(devices: list[Device]) -> list[str]:
    """Format the documentation's comparison with other libraries, for each machine that had
    them."""
    lines = []
    for device in devices:
        measured = [x for x in device.comparisons if x.group in LIBRARIES]
        found = [x for x in measured if any("median_ms" in row for row in x.rows.values())]
        lines += ["", *prose(f"{device.name} ({sources(found)}):"), *pairs(found)] if found else []
    return lines


SEGMENT = 512  # of the README's evaluation
# The README's columns, each with the fields that select its row in a comparison.
COLUMNS: dict[str, dict[str, str]] = {
    "ours": {"role": "ours"},
    "the paper's PyTorch code": {"implementation": "the paper's PyTorch code"},
    "SDPA with dense bias": {"implementation": "SDPA with dense bias"},
    "plain SDPA": {"implementation": "baseline: plain SDPA"},
}


def headline(devices: list[Device]) -> list[str]:
    """Format the README's tables, of the newest record of a CPU and of a GPU: evaluation beside the
    paper's speed-up, and attention."""
    return [*front_evaluation(devices), *front_attention(devices)]


def newest(found: list[tuple[Device, list[Measured]]]) -> list[tuple[Device, list[Measured]]]:
    """Return the device with the newest comparisons among CPUs, and among GPUs, of those that have
    any; each with its comparisons."""
    dated = sorted((x for x in found if x[1]), key=lambda x: str(x[1][0].about["date"]))
    of_kind = {x[1][0].about["kind"] == "cpu": x for x in dated}  # the last of each kind
    return [of_kind[is_cpu] for is_cpu in (True, False) if is_cpu in of_kind]


def measured_at(found: list[Measured]) -> str:
    """List dates and commits of the given measurements."""
    return "; ".join(dict.fromkeys(f"{x.about['date'][:10]}, commit {x.about['commit']}" for x in found))


def front_evaluation(devices: list[Device]) -> list[str]:
    """Format the speed-up of evaluation at the longest attention length: over the vanilla model as
    published, and over the fastest vanilla implementation."""
    cells: dict[tuple[str, str], str] = {}
    longest = max(SPEED_UP)

    def longest_of(device: Device) -> list[Measured]:
        group = device.group("evaluation speed")
        return [x for x in group if (x.case.model, x.case.attn_len) == ("enwik8-base", longest) and _front(x)]

    for device, found in newest([(device, longest_of(device)) for device in devices]):
        (measured,) = found
        mine = _front(measured)
        vanilla = [row for name, row in measured.rows.items() if name.startswith("vanilla") and "median_ms" in row]
        published = measured.find(implementation="vanilla, eager as published")
        fastest = min(vanilla, key=lambda row: float(row["median_ms"]))
        for column, row in (("over the vanilla model as published", published), ("over the fastest vanilla", fastest)):
            times = ratio(row, mine)
            cells[device.name, column] = "" if times is None else f"{number(times)}x"
        cells[device.name, "the paper, over its own"] = f"{SPEED_UP[longest]:,}x"
        cells[device.name, "measured"] = measured_at(found)
    title = (
        f"Evaluation with cached memory, enwik8-base, 12 layers, {longest:,} keys, segments of {SEGMENT} tokens: speed-up "
        "per token (the paper's Table 9)."
    )
    return ["", *prose(title), *pivot("machine", cells)] if cells else []


def _front(measured: Measured) -> Row | None:
    """Return this package's row in segments of the default length, if it was measured."""
    return next((row for row in measured.ours() if row["segment"] == SEGMENT and "median_ms" in row), None)


def front_attention(devices: list[Device]) -> list[str]:
    """Format tables of attention: a table for each shape, a row for each machine."""
    tables: dict[str, dict[tuple[str, str], str]] = {}
    groups = [(device, device.group("attention")) for device in devices]
    chosen = newest([(device, [x for x in all_ if x.case.shape == all_[0].case.shape]) for device, all_ in groups])
    for device, found in chosen:
        about = found[0].about
        head = (
            f"Attention, {' / '.join(str(x.case.direction) for x in found)}, {found[0].case.shape}, {about['dtype']}, "
            f"torch {about['torch'].partition('+')[0]}, milliseconds"
        )
        cells = tables.setdefault(head, {})
        for column, fields in COLUMNS.items():
            rows = [x.find(**fields) or {} for x in found]
            times = [number(row["median_ms"]) if "median_ms" in row else "failed" for row in rows]
            cells[device.name, column] = " / ".join(times) if set(times) != {"failed"} else ""
        peak = "FMA peak" if about["kind"] == "cpu" else "matrix products' peak"
        for who, fields in (("ours", COLUMNS["ours"]), ("plain SDPA", COLUMNS["plain SDPA"])):
            shares = ("disturbed" if x.disturbed else "".join(_share(x.find(**fields) or {})) for x in found)
            cells[device.name, f"share of the {peak}, {who}"] = " / ".join(shares)
        cells[device.name, "measured"] = measured_at(found)
    lines = []
    for head, cells in tables.items():
        lines += ["", *prose(f"{head}. Plain SDPA has no positions."), *pivot("machine", cells)]
    notes = dict.fromkeys(device.note for device, _ in chosen if device.note)
    return [*lines, *(line for note in notes for line in ("", *prose(note)))]
