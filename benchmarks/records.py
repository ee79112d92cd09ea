"""The records that benchmark runs leave in benchmarks/results/, and the newest measurement of each race on each machine."""

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
# Speed-up of the paper's Table 9 (per token, one GPU) by attention length.
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def number(x: float) -> str:
    """Three significant digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}".rstrip(".")


def same_segments(rival: str, mine: str) -> bool:
    """Whether two contestants of the evaluation speed may be compared: vanilla models know no segments."""
    return "segments of" not in rival or rival.split("segments of")[1] == mine.split("segments of")[1]


def sources(races: list["Measured"]) -> str:
    """Dates, commits and versions behind figures."""
    said = []
    for race in races:
        about = race.about
        changed = " with changes" if about["uncommitted_changes"] else ""
        said.append(
            f"{about['date'][:10]}, commit {about['commit']}{changed}, torch {about['torch']}, {about['dtype']}"
        )
    return "; ".join(dict.fromkeys(said))


def attention_length(case: str) -> int:
    """Of a race of the evaluation speed."""
    return int(case.split("attention length ")[1].split(",")[0])


@dataclass
class Measured:
    """One race: its rows by contestant, and the record they come from."""

    group: str
    case: str
    rows: dict[str, Row]
    about: Row

    def ms(self, contestant: str) -> float | None:
        """Median milliseconds; None if it was not measured."""
        found: float | None = self.rows.get(contestant, {}).get("median_ms")
        return found

    def why_not(self, contestant: str) -> str:
        """failed, unavailable, or an empty string if it was measured or took no part."""
        status: str = self.rows.get(contestant, {}).get("status", "")
        return "" if status == "measured" else status

    def ratio(self, slower: str, faster: str) -> float | None:
        """How many times as long the first takes; None if one was not measured."""
        a, b = self.ms(slower), self.ms(faster)
        return a / b if a and b else None


@dataclass
class Device:
    """All races of one machine, in the order they were run."""

    name: str
    races: list[Measured] = field(default_factory=list)

    def group(self, group: str) -> list[Measured]:
        return [race for race in self.races if race.group == group]

    def get(self, group: str, case: str) -> Measured | None:
        return next((race for race in self.group(group) if race.case == case), None)


def published() -> list[Path]:
    """The records under version control; a run leaves others, which `make report` takes too."""
    listed = subprocess.run(["git", "ls-files", "*.json"], capture_output=True, text=True, cwd=RESULTS.parent)
    return [path for path in (RESULTS.parent / line for line in listed.stdout.splitlines()) if path.exists()]


def load(paths: list[Path] | None = None) -> list[Device]:
    """Devices by name, each with the newest measurement of every race; rehearsals are left out.

    paths: None for all of benchmarks/results/.

    Raises:
        ValueError: a file is not a record.
    """
    records = []
    for path in sorted(RESULTS.glob("*.json")) if paths is None else paths:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            records.append((record["about"]["date"], record))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a benchmark record: {error}") from None
    newest: dict[str, dict[tuple[str, str], Measured]] = {}
    for _, record in sorted(records, key=lambda r: r[0]):
        about = record["about"]
        if about["kind"] == "rehearsal":
            continue
        threads = f", {about['threads']} threads, {about['isa']}" if about["kind"] == "cpu" else ""
        found = newest.setdefault(f"{about['device']}{threads}", {})
        fresh: dict[tuple[str, str], Measured] = {}
        for row in record["rows"]:
            key = row["group"], row["case"]
            race = fresh.setdefault(key, Measured(*key, {}, about))
            race.rows[row["contestant"]] = row
        found.update(fresh)
    return [Device(name, list(races.values())) for name, races in sorted(newest.items())]
