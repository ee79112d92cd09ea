"""Documents made from records: the report's tables, and the figures in the README and docs."""

import re
from pathlib import Path

from report import charts
from report.front import headline, in_short, libraries
from report.records import Device
from report.tables import LIBRARIES, PAIRS, evaluation, in_full, pairs, prose, sources, speed_ups

HERE = Path(__file__).parents[1]
README, DOCS = HERE.parent / "README.md", HERE.parent / "docs"
REPORT, PLOTS = HERE / "REPORT.md", DOCS / "pictures" / "plots"
SPEED, ACCELERATE = DOCS / "speed.md", DOCS / "how-to" / "accelerate.md"
BEGIN, END = "<!-- figures: written by `make report` -->", "<!-- end of figures -->"
INTRODUCTION = """# Benchmarks

Written by `make report` from the records in `results/`; not edited by hand. How to measure:
`pytest benchmarks/ --benchmark-only` (`--full` for the paper's sizes), in which implementations run
in turns, each compared with a float64 reference before it is timed.
"""
LEGEND = """- A time is the median of all rounds in milliseconds; in the report its quartiles follow in brackets.
- *12.3x* is the time as a multiple of the first implementation's.
- *64%* is the share of the roofline that was measured in the same comparison. Where arithmetic is the
  limit, this is the peak FLOP/s of multiply-adds in registers (on a GPU, of the library's matrix
  product), and only visible pairs count. Where memory is the limit, it is the bandwidth of a plain read
  (on a GPU, of a copy), for the bytes that must be read.
- Attention with positions needs three products of the head dim for each visible pair in forward and eight
  in backward; plain SDPA needs two and five.
- A limit does the same work in every round. If its median is over 1.2 times its fastest round, other
  work disturbed the comparison, and no shares are given. None are given either where the limit's row
  says that it multiplied zeros, because AMX does so faster than it multiplies other numbers.
- MiB are peak memory beyond the inputs (of a model, beyond the parameters).
"""
HOW_TO_READ = ("", "## How to read the tables of single machines", "")
# Groups that docs/speed.md shows besides evaluation; softmax was measured until commit f2a9f98.
SHOWN = ("attention", "Inkling", "decode", "training step", "softmax", "peak memory", "padding", "call overhead",
         "start-up")  # fmt: skip
TITLES = {"Inkling": "Inkling's attention", "training step": "training steps", "start-up": "time to start"}


def texts(devices: list[Device]) -> dict[Path, str]:
    """Return the required contents of the report, the README and the pages with figures."""
    return {
        REPORT: _joined([INTRODUCTION, "", LEGEND, *(line for device in devices for line in section(device))]),
        README: _with_figures(README, headline(devices)),
        SPEED: _with_figures(
            SPEED, [*in_short(devices), *HOW_TO_READ, LEGEND, *(line for device in devices for line in summary(device))]
        ),
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
    wanted |= {PLOTS / name: png for name, png in charts.draw(devices).items()}
    changed = [path for path, data in wanted.items() if not path.exists() or path.read_bytes() != data]
    for path in changed:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(wanted[path])
    return changed


def section(device: Device) -> list[str]:
    """Format all measurements of one machine."""
    lines = ["", f"## {device.name}", "", *prose(device.note)]
    for group in dict.fromkeys(measured.group for measured in device.comparisons):
        found = device.group(group)
        lines += ["", f"### {group[0].upper()}{group[1:]}", "", *prose(f"{sources(found)} where nothing else is said.")]
        lines += speed_ups(found) if group == "evaluation speed" else []
        lines += pairs(found) if group in PAIRS else in_full(found)
    return lines


def summary(device: Device) -> list[str]:
    """Format one machine's part of docs/speed.md: a heading for each group, to link to."""
    base = [x for x in device.group("evaluation speed") if x.case.model == "enwik8-base"]
    groups = {group: device.group(group) for group in SHOWN}
    groups["peak memory"] = [x for x in groups["peak memory"] if x.case.model]
    found = [*base, *(x for group in groups.values() for x in group)]
    lines = [
        "",
        f"## {device.name}",
        "",
        *prose(f"{sources(found)}; medians, implementations in turns."),
        "",
        *prose(device.note),
    ]
    if base:
        lines += ["", f"### Evaluation, {device.name}", *evaluation(base)]
    for group, found in groups.items():
        if found:
            title = TITLES.get(group, group)
            lines += ["", f"### {title[0].upper()}{title[1:]}, {device.name}", "", *in_full(found, of_page=True)]
    paired = [x for x in device.comparisons if x.group in LIBRARIES]
    if any("median_ms" in row for x in paired for row in x.rows.values()):
        lines += ["", f"### Other libraries' layers, {device.name}", "", *prose(f"{sources(paired)}.")]
        lines += pairs(paired)
    return lines
