"""The records that benchmark runs leave in benchmarks/results/, and the newest measurement of each race on each machine."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
# Speed-up of the paper's Table 9 (per token, one GPU) by attention length.
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def number(x: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}".rstrip(".")


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


def load(folder: Path = RESULTS) -> list[Device]:
    """Devices by name, each with the newest measurement of every race; rehearsals are left out.

    Raises:
        ValueError: a file is not a record.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
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
