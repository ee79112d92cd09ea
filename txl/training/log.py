"""The log of a run: one JSON object a line. Nothing that is wrong with it stops a run."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from txl.paths import AnyPath, replace_text


def append(path: Path, entry: dict[str, Any]) -> None:
    """Adds an entry."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read(path: AnyPath) -> tuple[list[dict[str, Any]], int]:
    """The entries of a log, and how many lines are not one: no JSON, no object, without a step."""
    found, damaged = [], 0
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError:
        return [], 0
    for line in lines:
        if not line:
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry["step"], int) or not isinstance(entry, dict):
                raise TypeError
            found.append(entry)
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged += 1
    return found, damaged


def truncate(path: Path, step: int, validated: bool = True) -> None:
    """Drops what a killed run logged after its last checkpoint, and a line it was writing.

    validated: False if the validation at this step is to be done again.

    A log with damaged lines is kept beside, as `log.damaged.jsonl`, with a warning.
    """
    entries, damaged = read(path)
    if damaged > 1 or (damaged and path.read_bytes().endswith(b"\n")):  # more than a line cut short
        kept = path.with_name("log.damaged.jsonl")
        os.replace(path, kept)
        warnings.warn(f"{path}: {damaged} damaged lines were dropped; the file as it was is {kept.name}", stacklevel=2)
    done = [e for e in entries if e["step"] < step or (e["step"] == step and (validated or "valid_loss" not in e))]
    replace_text(path, "".join(json.dumps(entry) + "\n" for entry in done))
