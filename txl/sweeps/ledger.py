"""What a sweep's folder keeps: its settings in `sweep.json`, each row's progress in its own."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from txl.errors import TxlError
from txl.evaluation.evaluate import Score
from txl.paths import AnyPath, replace_text

FORMAT = "txl-sweep-1"
_NAME, _ROW = "sweep.json", "row.json"
_PARTS = ("model", "train", "reading")  # of a row that must stay as they were


@dataclass(frozen=True)
class Progress:
    """How far a row is.

    Attributes:
        train: its options of training, once they are fixed; None before.
        trained: whether training is done. finished: when the last score was kept, in ISO 8601.
        parameters: of the model.
        train_seconds: of all its sessions that were not killed.
    """

    train: dict[str, Any] | None = None
    trained: bool = False
    finished: str | None = None
    parameters: int | None = None
    device: str | None = None
    threads: int | None = None
    train_seconds: float = 0.0
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """A sweep.

    Attributes:
        settings: `table`, `scale`, `corpus` (its fingerprint), `minutes`, `steps`, `eval_tokens`.
        rows: what each row of the table is, see `Plan.to_json`.
        corpus: its folder.
    """

    folder: Path
    settings: dict[str, Any]
    rows: dict[str, Any] = field(repr=False)
    corpus: Path

    def write(self) -> None:
        """A corpus inside the folder is named relative to it, so that both can be moved."""
        text, folder = self.corpus.resolve(), self.folder.resolve()
        where = text.relative_to(folder) if text.is_relative_to(folder) else text
        values = {"format": FORMAT, "settings": self.settings, "corpus": str(where), "rows": self.rows}
        replace_text(self.folder / _NAME, json.dumps(values, indent=2))

    def progress(self, name: str) -> Progress:
        """Raises TxlError: a row's file is damaged."""
        path = self.folder / name / _ROW
        if not path.exists():
            return Progress()
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["scores"] = tuple(Score(**score) for score in values["scores"])
            return Progress(**values)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TxlError(f"{path}: is damaged ({error}); remove {path.parent} to begin the row anew") from error

    def keep(self, name: str, progress: Progress) -> None:
        """Writes how far a row is."""
        (self.folder / name).mkdir(exist_ok=True)
        replace_text(self.folder / name / _ROW, json.dumps(dataclasses.asdict(progress), indent=2))

    def refuse_others(self, settings: dict[str, Any], rows: dict[str, Any] | None = None) -> None:
        """Raises TxlError that names what differs; settings that are not given may."""
        own = self.settings
        changed = [f"{k} is {_shown(v)}, was {_shown(own[k])}" for k, v in settings.items() if v != own[k]]
        for name, row in (rows or {}).items():
            for part in _PARTS:
                before, now = self.rows[name][part], row[part]
                differing = [k for k in {**before, **now} if before.get(k) != now.get(k)]
                changed += [f"{name}'s {k} is {now.get(k)}, was {before.get(k)}" for k in differing]
        if changed:
            raise TxlError(
                f"{self.folder}: holds another sweep: {'; '.join(changed)}; choose another folder with --run"
            )


def read(folder: AnyPath) -> Ledger | None:
    """The ledger of a folder; None if there is none.

    Raises:
        TxlError: it is damaged, or of another version.
    """
    folder = Path(folder)
    path = folder / _NAME
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r} is not {FORMAT!r} of this version")
        settings = {k: values["settings"][k] for k in ("table", "scale", "corpus", "minutes", "steps", "eval_tokens")}
        rows = dict(values["rows"])
        for row in rows.values():
            _ = [dict(row[part]) for part in _PARTS]
        return Ledger(folder, settings, rows, folder / values["corpus"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TxlError(f"{path}: no ledger that can be read ({error})") from error


def _shown(value: Any) -> Any:
    """A fingerprint by its beginning."""
    return f"{value[:12]}.." if isinstance(value, str) and len(value) > 20 else value
