"""A run's folder: options in `run.json`, log in `log.jsonl`, and a lock. Its checkpoints are in
`txl.training.checkpoint`."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl.errors import TxlError
from txl.paths import AnyPath, append_text, lock_file, naming, read_bytes, read_text, remove_leftovers, replace_text
from txl.training.checkpoint import BEST, LAST

# Options that may change on resume: they set the run's length, its reports, or how (not what) it
# computes.
CHANGEABLE = ("steps", "eval_every", "save_every", "log_every", "batch_chunk", "compile", "recompute")

_locks: dict[str, tuple[int, int]] = {}  # locks held by this process, by folder: descriptor and inode of the file


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


def begin(folder: Path) -> None:
    """Create and lock the folder of a new run, before anything in it is changed.

    Raises:
        TxlError: another process trains there, or a run has left a checkpoint there.
    """
    refuse_used_folder(folder)
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    take(folder)
    refuse_used_folder(folder)  # another process may have written one before the lock was taken


def go_on(folder: Path) -> RunRecord:
    """Lock the folder of an existing run, before anything in it is changed, and return its record.

    Raises:
        TxlError: another process trains there, or the folder holds no run.
    """
    read_record(folder)
    take(folder)
    return read_record(folder)


def take(folder: Path) -> None:
    """Lock a run's folder and remove the temporary files of processes that were killed.

    Raises:
        TxlError: another process trains there.
    """
    lock(folder)
    remove_leftovers(folder)


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
    """Lock a run's folder for this process; the operating system releases the lock when the process
    ends in any way. Does nothing if this process holds the lock already.

    Raises:
        TxlError: another process trains there.
    """
    key, path = str(folder.resolve()), folder / ".lock"
    held = _locks.get(key)
    if held is not None and path.exists() and path.stat().st_ino == held[1]:
        return  # held already; a folder that was removed and created again has another inode
    descriptor = lock_file(path)
    if descriptor is None:
        raise TxlError(f"{folder}: another process is training there")
    _locks[key] = descriptor, os.fstat(descriptor).st_ino


def unlock(folder: Path) -> None:
    """Release the lock of a folder, if this process holds it."""
    held = _locks.pop(str(folder.resolve()), None)
    if held is not None:
        os.close(held[0])


@contextmanager
def not_training(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs, if it is a run's folder.

    Raises:
        TxlError: another process trains there.
    """
    if not (folder / "run.json").exists() or str(folder.resolve()) in _locks:
        yield
        return
    lock(folder)
    try:
        yield
    finally:
        unlock(folder)


def append_log(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to a log, one JSON object a line."""
    append_text(path, json.dumps(entry) + "\n")


def read_log(path: AnyPath) -> tuple[list[dict[str, Any]], int]:
    """Return the entries of a log and the number of invalid lines (not JSON, not an object, or
    without a step).

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    found, damaged = [], 0
    try:
        lines = read_bytes(Path(path)).split(b"\n")
    except FileNotFoundError:
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


def truncate_log(path: Path, step: int) -> None:
    """Remove from a log what a killed run wrote after its last checkpoint, including an incomplete
    line.

    If the log has damaged lines, a copy is kept as `log.damaged.jsonl`, with a warning.
    """
    entries, damaged = read_log(path)
    if damaged > 1 or (damaged and read_bytes(path).endswith(b"\n")):  # more than one truncated last line
        kept = path.with_name("log.damaged.jsonl")
        os.replace(path, kept)
        warnings.warn(f"{path}: {damaged} damaged lines were dropped; the file as it was is {kept.name}", stacklevel=2)
    done = [e for e in entries if e["step"] <= step]
    replace_text(path, "".join(json.dumps(entry) + "\n" for entry in done))
