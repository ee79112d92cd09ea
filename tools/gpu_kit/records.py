"""What was measured: one JSON object a line, appended as it is made, so that no end loses it.

Of an item of work: {"step", "item", "state": "begun"}, then the same with "measured" and its
values, or "failed" and its reason. Of a step: {"step", "state", "seconds", "reason"}, without item.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Items = Iterable[tuple[str, Callable[[], Row]]]
ENDS = ("measured", "failed")


class Record:
    """A file of rows, also written by the processes of its steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, **row: Any) -> None:
        """One line, written whole: the file is opened for appending."""
        with open(self.path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    def rows(self) -> list[Row]:
        """All of them but lines that a kill cut short."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                found.append(row)
        return found

    def ended(self, step: str) -> set[str]:
        """Items of a step that need no second try."""
        return {x["item"] for x in self.rows() if x.get("step") == step and x.get("state") in ENDS}

    def lost(self, step: str) -> list[str]:
        """Items of a step that began and never ended, in their order."""
        begun = [x["item"] for x in self.rows() if x.get("step") == step and x.get("state") == "begun"]
        ended = self.ended(step)
        return [item for item in dict.fromkeys(begun) if item not in ended]


def work_through(record: Record, step: str, items: Items, alive: Callable[[], object] = lambda: None) -> None:
    """Every item that has not ended yet. alive: raises if nothing after a failure can be trusted,
    as on a GPU that a kernel broke; that ends the process, and the next takes what is left."""
    ended = record.ended(step)
    for item, work in items:
        if item in ended:
            continue
        record.add(step=step, item=item, state="begun")
        try:
            values = work()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip()[:600]
            record.add(step=step, item=item, state="failed", reason=reason)
            alive()
        else:
            record.add(step=step, item=item, state="measured", **values)
