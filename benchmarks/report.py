"""Turns the records in benchmarks/results/ into benchmarks/REPORT.md, its plots, and the README's figures.

    python benchmarks/report.py [--check]

`--check` writes nothing and fails if the report or the README do not say what the records say.
"""

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any

import plots
import summary
from records import PAPER, Device, Measured, attention_length, load, number, published, same_segments, sources

HERE = Path(__file__).parent
REPORT, README = HERE / "REPORT.md", HERE.parent / "README.md"
BEGIN, END = "<!-- figures: written by `make report` -->", "<!-- end of figures -->"
INTRODUCTION = """# Benchmarks

Written by `make report` from the records in `results/`; not edited by hand. How to measure:
`pytest benchmarks/ --benchmark-only` (`--full` for the paper's sizes), in which contestants run in turns, each compared with
a float64 reference before it is timed.

A cell is the median of its rounds, with quartiles in brackets. *x* is the time as a multiple of the first contestant's.
Shares are of the limit measured in the same race: multiply-adds in registers (on a GPU, the library's matrix product) for
the useful operations, visible pairs only; a plain read (a copy) for the bytes that must be read.
"""


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(cells) + " |" for cells in (head, ["---"] + ["---:"] * (len(head) - 1), *rows)
    ]  # numbers to the right


def _time(row: dict[str, Any]) -> str:
    low, high = row["quartiles_ms"]
    return f"{number(row['median_ms'])} [{number(low)}, {number(high)}]"


def _share(row: dict[str, Any]) -> str:
    if "limit" in row:
        return f"{number(row['gflops'])} GFLOP/s" if row["limit"] == "operations" else f"{number(row['gb_per_s'])} GB/s"
    return next((f"{row[key]:.0%}" for key in ("share_of_operations", "share_of_bytes") if key in row), "")


def race_table(race: Measured) -> list[str]:
    """A race in full: a row for each contestant, the failed ones too."""
    first, tokens = next(iter(race.rows.values())).get("median_ms"), race.case.endswith("one token")
    rows = []
    for name, row in race.rows.items():
        if "median_ms" not in row:
            rows.append([name, f"{row['status']}: {row['error'].splitlines()[0][:100]}".replace("|", "/"), "", "", ""])
        else:
            times = f"{row['median_ms'] / first:.2f}" if first else ""
            rate = number(1e3 / row["median_ms"]) if tokens else _share(row)
            rows.append([name, _time(row), times, rate, str(row["rounds"])])
    return table([race.case, "ms", "x", "tokens a second" if tokens else "share of the limit", "rounds"], rows)


def pivot(races: list[Measured], column: str, cell: Any) -> list[str]:
    """Races beside each other: a column for each, a row for each contestant."""
    names = list(dict.fromkeys(name for race in races for name in race.rows))
    heads = [race.case.split(column)[1].split(",")[0].split()[0] for race in races]
    rows = [[name, *(cell(race.rows[name]) if name in race.rows else "" for race in races)] for name in names]
    return table([column.strip(" ="), *heads], rows)


def _peak(row: dict[str, Any]) -> str:
    return number(row["peak_mib"]) if "peak_mib" in row else f"{row['status']}"


def table_9(races: list[Measured]) -> list[str]:
    """Speed-up over each vanilla model at each attention length, the paper's column beside ours."""
    lines = []
    models = list(dict.fromkeys(race.case.split(", attention")[0] for race in races))
    for model in models:
        chosen = [race for race in races if race.case.startswith(model)]
        ours = [name for name in chosen[0].rows if name.startswith("ours")]
        others = [name for name in dict.fromkeys(n for race in chosen for n in race.rows) if name not in ours]
        for mine in ours:
            rows = []
            rivals = [name for name in others if same_segments(name, mine)]
            for race in chosen:
                length = attention_length(race.case)
                ratios = [race.ratio(name, mine) for name in rivals]
                cells = ["" if ratio is None else f"{number(ratio)}x" for ratio in ratios]
                rows.append([f"{length:,}", f"{PAPER[length]:,}x", _ms(race.rows[mine]).split(" [")[0], *cells])
            head = ["attention length", "paper", "ours, ms a token", *(f"speed-up over {name}" for name in rivals)]
            lines += [f"\n**{model}; {mine}**\n", *table(head, rows)]
    return lines


def device_report(device: Device, folder: Path | None) -> list[str]:
    """One machine's section. folder: where its plots go; None to draw none."""
    lines = [f"\n## {device.name}\n"]
    groups = list(dict.fromkeys(race.group for race in device.races))
    pictures = plots.draw(device, folder) if folder else plots.names(device)
    for group in groups:
        races = device.group(group)
        lines.append(f"\n### {group[0].upper()}{group[1:]}\n")
        lines.append(f"{sources(races)} where nothing else is said.\n")
        if group == "evaluation speed":
            lines += table_9(races)
            for model in dict.fromkeys(race.case.split(", attention")[0] for race in races):
                chosen = [race for race in races if race.case.startswith(model)]
                lines += [f"\n{model}, milliseconds a token:\n", *pivot(chosen, "attention length ", _ms)]
        elif group.startswith("speed against length"):
            lines += ["Milliseconds:\n", *pivot(races, " M", _ms)]
        elif group == "peak memory":
            attention = [race for race in races if race.case.startswith("attention")]
            lines += ["MiB beyond the inputs:\n", *pivot(attention, "L = M = ", _peak)]
            for race in races:
                if race not in attention:
                    rows = [[name, _peak(row)] for name, row in race.rows.items()]
                    lines += ["", *table([race.case, "MiB beyond the parameters"], rows)]
        else:
            for race in races:
                lines += [*race_table(race), ""]
        lines += [f"\n![{group}](plots/{name})" for name in pictures.get(group, [])]
    return lines


def _ms(row: dict[str, Any]) -> str:
    return _time(row) if "median_ms" in row else str(row["status"])


def documents(devices: list[Device], folder: Path | None) -> dict[Path, str]:
    """What each document should hold."""
    lines = [INTRODUCTION]
    for device in devices:
        lines += device_report(device, folder)
    readme = README.read_text(encoding="utf-8")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    figures = "\n".join(summary.lines(devices))
    return {REPORT: "\n".join(lines).rstrip() + "\n", README: f"{before}{BEGIN}\n{figures}\n{END}{after}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the documents differ")
    arguments = parser.parse_args()
    devices = load(published() if arguments.check else None)
    wanted = documents(devices, None if arguments.check else HERE / "plots")
    for path, text in wanted.items():
        if arguments.check:
            found = path.read_text(encoding="utf-8") if path.exists() else ""
            if found != text:
                changes = difflib.unified_diff(found.splitlines(), text.splitlines(), path.name, "records", lineterm="")
                sys.exit(
                    "\n".join([*list(changes)[:40], f"{path.name} does not say what the records say: make report"])
                )
        else:
            path.write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
