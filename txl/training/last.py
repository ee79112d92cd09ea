"""Which checkpoint a run goes on from: `last.safetensors`, or `last-STEP` of a sharded run."""

import json
import math
import re
import shutil
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

WHOLE = "last.safetensors"
_SHARDS = re.compile(r"last-(\d+)(?:\.(\d+))?")


def shards_folder(run: Path, step: int) -> Path:
    """Where a sharded run is to keep its checkpoint of a step: never a folder that is there, since
    one cannot be replaced at once."""
    again = [version for (of, version), _ in _shards(run) if of == step]
    return run / (f"last-{step}.{max(again) + 1}" if again else f"last-{step}")


def unfinished(folder: Path) -> Path:
    """Where such a folder is written before it is put in place."""
    return folder.with_name(f".{folder.name}.tmp")


def find_last(run: Path) -> Path | None:
    """The newest checkpoint of a run to go on from; None if there is none."""
    found: dict[tuple[int, float], Path] = dict(_shards(run))
    if (run / WHOLE).is_file():
        found[_step(run / WHOLE), math.inf] = run / WHOLE
    return found[max(found)] if found else None


def remove_older(kept: Path) -> None:
    """Removes the checkpoints to go on from that are not this one."""
    for _, folder in _shards(kept.parent):
        if folder != kept:
            gone = folder.with_name(f".{folder.name}.old.tmp")  # at once, or half of it could be found
            with suppress(OSError):
                folder.rename(gone)
                shutil.rmtree(gone)
    whole = kept.parent / WHOLE
    if whole != kept:
        whole.unlink(missing_ok=True)


def remove_unfinished(run: Path) -> None:
    """Removes what killed processes were writing; for the only one that writes there."""
    for path in run.glob(".*.safetensors.*.tmp"):
        with suppress(OSError):
            path.unlink()
    for path in run.glob(".last-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _shards(run: Path) -> list[tuple[tuple[int, int], Path]]:
    """Folders by step, and how often that step was written before."""
    named = [(_SHARDS.fullmatch(path.name), path) for path in run.glob("last-*")]
    return [((int(match[1]), int(match[2] or 0)), path) for match, path in named if match and path.is_dir()]


def _step(whole: Path) -> int:
    """Of a file; -1 if that cannot be told."""
    try:
        with safe_open(whole, framework="pt") as file:
            return int(json.loads((file.metadata() or {})["txl"])["state"]["step"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError):
        return -1
