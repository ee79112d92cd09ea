"""A run's folder: options in `run.json`, log in `log.jsonl`, and a lock. Its checkpoints are in
`txl.training.checkpoint`."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl.errors import TxlError
from txl.paths import AnyPath, lock_folder, make_folder, read_bytes, read_text, replace_text
from txl.training.checkpoint import BEST, LAST

# Options that may change on resume: they set the run's length, its reports, or how (not what) it
# computes.
CHANGEABLE = ("steps", "eval_every", "save_every", "log_every", "batch_chunk", "compile", "recompute")


@dataclass(frozen=True)
class RunRecord:
    """The contents of `run.json`: the options of model and training as JSON, and the corpus."""

    model: dict[str, Any]
    train: dict[str, Any]
    corpus: Path


def refuse_used_folder(folder: AnyPath) -> None:
    """Raise TxlError if a run has left a checkpoint in the folder."""
    if Path(folder, LAST).exists() or Path(folder, BEST).exists():
        raise TxlError(f"{folder}: already holds a run; continue it with --resume or choose another folder")


def begin(folder: Path, option: str = "--run") -> None:
    """Create and lock the folder of a new run, before anything in it is changed.

    option: the name of the argument in errors.

    Raises:
        TxlError: it cannot be created or is not writable, another process trains there, or a run
            has left a checkpoint there.
    """
    make_folder(folder, option)
    lock(folder)
    refuse_used_folder(folder)


def write_record(folder: Path, model: dict[str, Any], train: dict[str, Any], corpus: Path) -> None:
    """Write `run.json`. A corpus inside the folder is stored as a relative path, so that run and
    corpus can be moved together."""
    text = corpus.resolve()
    inside = text.is_relative_to(folder.resolve())
    where = text.relative_to(folder.resolve()) if inside else text
    record = {"model": model, "train": train, "corpus": str(where)}
    replace_text(folder / "run.json", json.dumps(record, indent=2))


def read_record(folder: AnyPath) -> RunRecord:
    """Return the options and the corpus of the run in a folder.

    Raises:
        TxlError: the folder holds no run.
    """
    folder = Path(folder)
    try:
        values = json.loads(read_text(folder / "run.json"))
        if not isinstance(values["model"], dict) or not isinstance(values["train"], dict):
            raise TypeError("model and train must be objects")
        return RunRecord(values["model"], values["train"], folder / values["corpus"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TxlError(f"{folder}: holds no run ({error})") from error


def refuse_changes(
    folder: Path, what: str, saved: dict[str, Any], asked: dict[str, Any], allowed: tuple[str, ...] = ()
) -> None:
    """Raise TxlError with the names of all options that differ and are not in `allowed`."""
    names = [k for k in {**saved, **asked} if k not in allowed and saved.get(k) != asked.get(k)]
    if names:
        changed = "; ".join(f"{k} is {asked.get(k)}, was {saved.get(k)}" for k in names)
        may = f" ({', '.join(allowed)} may change)" if allowed else ""
        raise TxlError(f"{folder}: cannot resume with other {what} options: {changed}{may}")


def lock(folder: Path) -> None:
    """Lock a run's folder for this process; see `lock_folder`."""
    lock_folder(folder, "is training")


def read_log(path: AnyPath) -> list[dict[str, Any]]:
    """Return the entries of a log; lines that are not JSON objects with a step are left out.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    found: list[dict[str, Any]] = []
    if not os.path.lexists(path):
        return found
    for line in read_bytes(Path(path)).split(b"\n"):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry["step"], int):
                found.append(entry)
    return found


def truncate_log(path: Path, step: int, unvalidated: bool = False) -> None:
    """Remove from a log what a killed run wrote after its last checkpoint, and lines that are not
    entries.

    step: that of the checkpoint. unvalidated: whether it is from before the validation of its step.
    """
    entries = [entry for entry in read_log(path) if entry["step"] <= step]
    if unvalidated:
        entries = [entry for entry in entries if entry["step"] < step or "valid_loss" not in entry]
    replace_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))
