"""What commands leave in a run's folder for its page; nothing that is wrong with it stops one."""

import dataclasses
import fcntl
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl.evaluation.evaluate import Score
from txl.evaluation.speed import Speedup
from txl.paths import replace_text

EVALUATIONS, SPEED, SAMPLES = "evaluations.json", "speed.json", "samples.json"


@dataclass(frozen=True)
class Evaluation:
    """A score and how it was come by.

    Attributes:
        what: in words, as "no memory, segments of 128"; "" for the method at its attention length.
        memory: False where a token saw no more than the window or segment it is in.
        checkpoint: digest of what was scored.
        batch: streams side by side, each of which begins without memory.
    """

    score: Score
    split: str
    method: str
    what: str = ""
    memory: bool = True
    checkpoint: str = ""
    batch: int = 8

    @property
    def key(self) -> tuple[Any, ...]:
        """A later one of the same key takes its place."""
        return (self.checkpoint, self.split, self.method, self.what, self.score.attn_len, self.score.tokens, self.batch)


def keep_evaluations(folder: Path, new: Sequence[Evaluation]) -> None:
    """Adds those that are finite to what is there, in the place of older ones of the same."""
    with _alone(folder):
        finite = [each for each in new if math.isfinite(each.score.nats)]
        replaced = {each.key for each in finite}
        found = [*(each for each in evaluations(folder) if each.key not in replaced), *finite]
        _write(folder / EVALUATIONS, [dataclasses.asdict(each) for each in found])


def evaluations(folder: Path) -> list[Evaluation]:
    found = []
    for entry in _read(folder / EVALUATIONS):
        try:
            each = Evaluation(**(entry | {"score": Score(**entry["score"])}))
        except (TypeError, KeyError):
            continue
        if _can_be_shown(each):
            found.append(each)
    return found


def _can_be_shown(each: Evaluation) -> bool:
    words = (each.split, each.method, each.what, each.checkpoint)
    counts, score = (each.score.attn_len, each.score.tokens, each.batch), each.score
    right = all(type(x) is str for x in words) and all(type(x) is int for x in counts)
    return right and _positive(*counts, score.seconds) and _finite(score.nats)


def keep_speed(folder: Path, speeds: Sequence[Speedup]) -> None:
    _write(folder / SPEED, [dataclasses.asdict(each) for each in speeds])


def speeds(folder: Path) -> list[Speedup]:
    found = []
    for entry in _read(folder / SPEED):
        try:
            each = Speedup(**entry)
        except TypeError:
            continue
        if _positive(each.attn_len, each.vanilla_s, each.cached_s):
            found.append(each)
    return found


def keep_samples(folder: Path, samples: Sequence[dict[str, Any]]) -> None:
    """samples: objects with "context", "generation" and "reference", texts or absent."""
    _write(folder / SAMPLES, list(samples))


def samples(folder: Path) -> list[dict[str, Any]]:
    """Those with a text that was generated."""
    return [x for x in _read(folder / SAMPLES) if isinstance(x, dict) and isinstance(x.get("generation"), str)]


def recl(path: Path) -> dict[str, Any] | None:
    """What `txl recl` wrote, as far as a page shows it; None if it is not all there."""
    values = read_object(path)
    if values is None:
        return None
    try:
        contexts = [int(c) for c in values["contexts"]]
        perplexity = {str(m): [float(x) for x in row] for m, row in values["perplexity"].items()}
        effective = {
            str(r): {m: (int(group[m]["length"]), bool(group[m]["reached_end"])) for m in perplexity}
            for r, group in values["effective"].items()
        }
        whole = contexts and perplexity and all(len(row) == len(contexts) for row in perplexity.values())
        if not whole or not _finite(*[x for row in perplexity.values() for x in row]):
            return None
        return {
            "contexts": contexts, "perplexity": perplexity, "effective": effective, "positions": int(values["positions"]),
            "checkpoints": list(dict(values.get("checkpoints", {})).values()),
        }  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is none."""
    values = _json(path)
    return values if isinstance(values, dict) else None


def _read(path: Path) -> list[Any]:
    values = _json(path)
    return values if isinstance(values, list) else []


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _finite(*values: Any) -> bool:
    return all(isinstance(x, (int, float)) and abs(x) < 1e100 for x in values)


def _positive(*values: Any) -> bool:
    return _finite(*values) and all(x > 0 for x in values)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time reads, adds and writes."""
    with (folder / ".kept.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, values: list[Any]) -> None:
    replace_text(path, json.dumps(values, indent=2) + "\n")
