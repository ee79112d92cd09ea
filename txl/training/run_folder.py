"""The folder of a run: its options in `run.json`, its log in `log.jsonl`, its checkpoints."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl.errors import TxlError
from txl.paths import AnyPath, replace_text
from txl.training.last import find_last

# What may differ when a run is resumed: how long it is, what is looked at, how it is computed.
CHANGEABLE = ("steps", "eval_every", "save_every", "log_every", "batch_chunk", "compile", "recompute")


@dataclass(frozen=True)
class RunRecord:
    """What `run.json` says of a run: the options of model and training as JSON, and the corpus."""

    model: dict[str, Any]
    train: dict[str, Any]
    corpus: Path


def refuse_used_folder(folder: AnyPath) -> None:
    """Raises TxlError if a run has left a checkpoint in the folder."""
    if find_last(Path(folder)) or Path(folder, "best.safetensors").exists():
        raise TxlError(f"{folder}: already holds a run; continue it with --resume or choose another folder")


def write_record(folder: Path, model: dict[str, Any], train: dict[str, Any], corpus: Path) -> None:
    """A corpus inside the folder is named relative to it, so that both can be moved."""
    text = corpus.resolve()
    inside = text.is_relative_to(folder.resolve())
    where = text.relative_to(folder.resolve()) if inside else text
    record = {"model": model, "train": train, "corpus": str(where)}
    replace_text(folder / "run.json", json.dumps(record, indent=2))


def read_record(folder: AnyPath) -> RunRecord:
    """The options and the corpus of the run in a folder.

    Raises:
        TxlError: there is none.
    """
    folder = Path(folder)
    try:
        values = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if not isinstance(values["model"], dict) or not isinstance(values["train"], dict):
            raise TypeError("model and train must be objects")
        return RunRecord(values["model"], values["train"], folder / values["corpus"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TxlError(f"{folder}: holds no run ({error})") from error


def refuse_changes(
    folder: Path, what: str, saved: dict[str, Any], asked: dict[str, Any], allowed: tuple[str, ...] = ()
) -> None:
    """Raises TxlError that names each option that differs and may not."""
    names = [k for k in {**saved, **asked} if k not in allowed and saved.get(k) != asked.get(k)]
    if names:
        changed = "; ".join(f"{k} is {asked.get(k)}, was {saved.get(k)}" for k in names)
        may = f" ({', '.join(allowed)} may change)" if allowed else ""
        raise TxlError(f"{folder}: cannot resume with other {what} options: {changed}{may}")
