"""The records that benchmark runs leave in benchmarks/results/, and the newest record of each
comparison on each machine.

A row identifies its group, case and implementation by fields (`harness.case.Case`,
`harness.comparison.Implementation`); a record's "about" gives its schema version and the machine.
"""

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.case import SCHEMA, Case, Row, disturbed, sdpa_note

# Groups, and ends of implementations' names, in records until commit bb1b469; FlexAttention's until
# 2026-11-28.
RENAMED = {"forms": "variants"}
RENAMED_ENDS = {
    ", told of lengths": ", with end",
    ", not told of padding": ", without end",
    ", not told": ", without end",
    "FlexAttention, captured bias": "FlexAttention, captured bias, default block sizes",
}
# Parts of implementations' names, and of notes of cases, until 2026-11-29.
RENAMED_PARTS = {
    "last layer for one token": "top layer for the last token alone",
    "bound: all but the attention": "lower bound: a step without attention",
}
RENAMED_NOTES = {" s of sound": " s of audio"}
# The limit of bfloat16 until 2026-11-28, which on AMX multiplied zeros.
OLD_BFLOAT16_PEAK = "limit: bfloat16 peak"
RESULTS = Path(__file__).parents[1] / "results"


def ratio(slower: Row | None, faster: Row | None) -> float | None:
    """Return the ratio of two times, the first over the second; None if one was not measured."""
    if slower is None or faster is None or "median_ms" not in slower or "median_ms" not in faster:
        return None
    return float(slower["median_ms"] / faster["median_ms"])


@dataclass
class Measured:
    """One comparison: its rows by implementation, and the "about" of its record."""

    group: str
    case: Case
    rows: dict[str, Row]
    about: Row

    def find(self, **fields: Any) -> Row | None:
        """Return the first row with these fields."""
        return next((row for row in self.rows.values() if all(row.get(k) == x for k, x in fields.items())), None)

    def ours(self) -> list[Row]:
        return [row for row in self.rows.values() if row["role"] == "ours"]

    def speed_ups(self, row: Row | None) -> list[float]:
        """Return the ratio of a row's time to each of this package's rows with the same segment
        length (all of them if the row has none, as for vanilla models)."""
        mine = [x for x in self.ours() if row is not None and row.get("segment") in (None, x["segment"])]
        return [found for x in mine if (found := ratio(row, x)) is not None]

    @property
    def disturbed(self) -> str:
        """The reason why it has no shares; empty if it was not disturbed."""
        return disturbed(list(self.rows.values()))


@dataclass
class Device:
    """All comparisons of one machine, in the order in which they were run."""

    name: str
    comparisons: list[Measured] = field(default_factory=list)

    @property
    def note(self) -> str:
        """A note on comparisons with torch's SDPA on this machine; empty if there is none."""
        about = self.comparisons[0].about
        return sdpa_note(about["device"], about.get("isa"))

    def group(self, group: str, direction: str | None = None) -> list[Measured]:
        """Return the comparisons of a group, or only those of one direction."""
        return [x for x in self.comparisons if x.group == group and direction in (None, x.case.direction)]


def published() -> list[Path]:
    """Return the records under version control, those that are only staged included.

    Raises:
        RuntimeError: this is not a git checkout.
    """
    listed = subprocess.run(["git", "ls-files", "*.json"], capture_output=True, text=True, cwd=RESULTS)
    if listed.returncode != 0:
        raise RuntimeError(f"the published records cannot be listed without git: {listed.stderr.strip()}")
    return [path for path in (RESULTS / line for line in listed.stdout.splitlines()) if path.exists()]


def load(paths: list[Path]) -> list[Device]:
    """Read records; return devices, the one measured last first, each with the newest measurement
    of every comparison. Runs in the interpreter are left out, and comparisons of which nothing was
    available, as without other libraries.

    Raises:
        ValueError: a file is not a record, or has another schema version.
    """
    newest: dict[str, dict[tuple[str, Case], Measured]] = {}
    for record in sorted(map(_read, paths), key=lambda record: str(record["about"]["date"])):
        about = record["about"]
        if about["kind"] == "interpreter":
            continue
        if about["isa"] == "amx":
            _drop_shares_of_zeros(record["rows"])
        of_cpu = f"{_generation(about)}, {about['threads']} threads, {about['isa']}" if about["kind"] == "cpu" else ""
        fresh: dict[tuple[str, Case], Measured] = {}
        for row in record["rows"]:
            for old, new in RENAMED_NOTES.items():
                if old in row["case"].get("note", ""):
                    row["case"]["note"] = row["case"]["note"].replace(old, new)
            key = RENAMED.get(row["group"], row["group"]), Case.from_json(row["case"])
            for old, new in RENAMED_PARTS.items():
                row["implementation"] = row["implementation"].replace(old, new)
            for old, new in RENAMED_ENDS.items():
                if row["implementation"].endswith(old):
                    row["implementation"] = row["implementation"].removesuffix(old) + new
            fresh.setdefault(key, Measured(*key, {}, about)).rows[row["implementation"]] = row
        found = {k: x for k, x in fresh.items() if any(row["status"] != "unavailable" for row in x.rows.values())}
        newest.setdefault(f"{about['device']}{of_cpu}", {}).update(found)
    devices = [Device(name, list(found.values())) for name, found in newest.items()]
    return sorted(devices, key=lambda device: max(x.about["date"] for x in device.comparisons), reverse=True)


def _drop_shares_of_zeros(rows: list[Row]) -> None:
    """If these rows of a record have AMX's limit for products of zeros, which AMX computes faster
    than others, say so in its name, and drop the shares of it."""
    limits = [row for row in rows if row["implementation"] == OLD_BFLOAT16_PEAK]
    for row in limits:
        row["implementation"] += ", products of zeros"
    for row in rows if limits else []:
        if row.get("dtype") == "bfloat16":
            row.pop("share_of_operations", None)


def _generation(about: Row) -> str:
    """Return " (Zen 4)" and the like for an AMD processor with AVX-512, whose name does not say
    which it is: a Zen 4 runs 512-bit instructions in halves."""
    if "AMD" not in about["device"] or not str(about["isa"]).startswith("avx512"):
        return ""
    names = {25: " (Zen 4)", 26: " (Zen 5)"}
    return names.get(about["family"], f" (family {about['family']})")


def _read(path: Path) -> Row:
    try:
        record: Row = json.loads(path.read_text(encoding="utf-8"))
        schema, _ = record["about"].get("schema", 1), record["about"]["date"]
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a benchmark record: {error}") from None
    if schema != SCHEMA:
        raise ValueError(f"{path} is a record of schema {schema}, but this report reads schema {SCHEMA}: measure again")
    return record
