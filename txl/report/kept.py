"""What commands leave in a run's folder for its page; nothing that is wrong with it stops one."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl.evaluation.score import Score
from txl.evaluation.speed import Speedup
from txl.paths import replace_text

EVALUATIONS, SPEED, SAMPLES = "evaluations.json", "speed.json", "samples.json"


@dataclass(frozen=True)
class Evaluation:
    """A score and how it was come by.

    Attributes:
        what: in words, as "no memory, segments of 128"; "" for the method at its attention length.
        memory: False where a token saw no more than the window or segment it is in.
    """

    score: Score
    split: str
    method: str
    what: str = ""
    memory: bool = True

    @property
    def key(self) -> tuple[Any, ...]:
        """A later one of the same key takes its place."""
        return (self.split, self.method, self.what, self.score.attn_len, self.score.tokens)


def keep_evaluations(folder: Path, new: Sequence[Evaluation]) -> None:
    """Adds them to those that are there, in the place of older ones of the same."""
    found = {each.key: each for each in [*evaluations(folder), *new]}
    _write(folder / EVALUATIONS, [dataclasses.asdict(each) for each in found.values()])


def evaluations(folder: Path) -> list[Evaluation]:
    entries = _read(folder / EVALUATIONS)
    try:
        return [Evaluation(Score(**entry.pop("score")), **entry) for entry in entries]
    except (TypeError, AttributeError, KeyError):
        return []


def keep_speed(folder: Path, speeds: Sequence[Speedup]) -> None:
    _write(folder / SPEED, [dataclasses.asdict(each) for each in speeds])


def speeds(folder: Path) -> list[Speedup]:
    try:
        return [Speedup(**entry) for entry in _read(folder / SPEED)]
    except TypeError:
        return []


def keep_samples(folder: Path, samples: Sequence[dict[str, Any]]) -> None:
    """samples: objects with "context", "generation" and "reference", texts or absent."""
    _write(folder / SAMPLES, list(samples))


def samples(folder: Path) -> list[dict[str, Any]]:
    """Those with a text that was generated."""
    return [x for x in _read(folder / SAMPLES) if isinstance(x, dict) and isinstance(x.get("generation"), str)]


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _read(path: Path) -> list[Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return values if isinstance(values, list) else []


def _write(path: Path, values: list[Any]) -> None:
    replace_text(path, json.dumps(values, indent=2) + "\n")
